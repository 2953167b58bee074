if __name__ != "inkrt.engines":  # two copies of one module would give two plugin registries
    raise ImportError("import this package as inkrt.engines, not as engines")
