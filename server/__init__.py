if __name__ != "inkrt.server":  # two copies of one module would give two plugin registries
    raise ImportError("import this package as inkrt.server, not as server")
