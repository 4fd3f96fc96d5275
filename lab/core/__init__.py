"""The ground floor of every wing: errors, config schemas, registries, hook points, files, the machine, processes."""
