if __name__ != "inkrt.plugins":  # two copies of one module would give two plugin registries
    raise ImportError("import this package as inkrt.plugins, not as plugins")
