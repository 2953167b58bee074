"""The commands: thin fronts that parse, call the package and print."""
