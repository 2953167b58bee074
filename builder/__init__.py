if __name__ != "inkrt.builder":  # two copies of one module would give two plugin registries
    raise ImportError("import this package as inkrt.builder, not as builder")
