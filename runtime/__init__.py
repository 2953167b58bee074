if __name__ != "inkrt.runtime":  # two copies of one module would give two plugin registries
    raise ImportError("import this package as inkrt.runtime, not as runtime")
