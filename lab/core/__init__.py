"""What every wing stands on: errors, config schemas, registries, hook points, files, the machine, processes."""
