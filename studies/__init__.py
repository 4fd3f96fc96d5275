"""Studies: a package each, with its claims, measures, figures and answer; nothing outside this folder imports one."""
