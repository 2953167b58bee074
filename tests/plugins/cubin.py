"""What a cubin says of its kernels."""

import struct


def resources(cubin: bytes) -> dict[str, int]:
    """Registers of a thread and bytes of its stack; of several kernels, the most.

    A cubin is an ELF file. Its section .nv.info is a list of (format, attribute, size) and payload;
    the payloads of interest are two words: symbol, value. Spilled registers stand on the stack.
    """
    attributes = {0x2F: "registers", 0x11: "stack"}
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    entry_size, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", cubin, table + i * entry_size) for i in range(count)]
    found: dict[str, int] = {}
    for name, _, _, _, offset, size in headers:
        start = headers[names][4] + name
        if cubin[start : cubin.index(b"\0", start)] != b".nv.info":
            continue
        position = offset
        while position < offset + size:
            kind, attribute, length = struct.unpack_from("<BBH", cubin, position)
            position += 4
            if kind == 4:
                if attribute in attributes:
                    _, value = struct.unpack_from("<II", cubin, position)
                    name_of = attributes[attribute]
                    found[name_of] = max(found.get(name_of, 0), value)
                position += length
    return found


def code_bytes(cubin: bytes) -> int:
    """Bytes of machine code of a cubin with one kernel."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    _, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", cubin, table + i * 64) for i in range(count)]
    size = 0
    for name, _, _, _, _, length in headers:
        start = headers[names][4] + name
        if cubin[start:].startswith(b".text."):
            size += length
    return size


def loads_held_up(cubin: bytes) -> list[int]:
    """How many loads are held up behind each wait for earlier kernels, in Hopper's machine code.

    An instruction of 128 bits names a counter that it raises until it is done, and counters that
    have to be zero first. Held up are loads with an instruction in front of them, behind the last
    early load, that waits for the counter of an early load. Code is read in the order of addresses,
    from an early load to the first store behind the wait.
    """
    load, store, wait = 0x981, 0x986, 0x82E
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    _, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", cubin, table + i * 64) for i in range(count)]
    found = []
    for name, _, _, _, offset, size in headers:
        start = headers[names][4] + name
        if not cubin[start:].startswith(b".text."):
            continue
        counters: set[int] = set()  # of early loads
        is_behind = is_held = False
        for at in range(offset, offset + size, 16):
            low, high = struct.unpack_from("<QQ", cubin, at)
            operation, raised, awaited = low & 0xFFF, high >> 46 & 7, high >> 52 & 63
            zero = {counter for counter in counters if awaited >> counter & 1}
            is_held |= bool(zero)
            counters -= zero
            if operation == wait:
                is_behind = True
                found.append(0)
            elif operation == load and is_behind:
                found[-1] += is_held
            elif operation == load:
                counters.add(raised)
                is_held = False
            elif operation == store:
                counters, is_behind, is_held = set(), False, False
    return found


def missing_functions(cubin: bytes) -> set[str]:
    """Names of functions that a cubin calls and does not have."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    _, count, _ = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQII", cubin, table + i * 64) for i in range(count)]
    found = set()
    for _, kind, _, _, offset, size, link, _ in headers:
        if kind != 2:  # a table of symbols
            continue
        for at in range(offset, offset + size, 24):
            name, info, _, section = struct.unpack_from("<IBBH", cubin, at)
            if info & 15 == 2 and section == 0:
                start = headers[link][4] + name
                found.add(cubin[start : cubin.index(b"\0", start)].decode())
    return found


def stacks(cubin: bytes) -> dict[str, int]:
    """Bytes of the stack of every kernel of a cubin, spilled registers among them, by name."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    _, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQI", cubin, table + i * 64) for i in range(count)]

    def text(strings: int, offset: int) -> str:
        start = headers[strings][4] + offset
        return cubin[start : cubin.index(b"\0", start)].decode()

    sections = {text(names, header[0]): header for header in headers}
    _, _, _, _, symbols, _, strings = sections[".symtab"]
    _, _, _, _, position, size, _ = sections[".nv.info"]
    found: dict[str, int] = {}
    end = position + size
    while position < end:
        kind, attribute, length = struct.unpack_from("<BBH", cubin, position)
        position += 4
        if kind == 4:
            if attribute == 0x11:
                symbol, value = struct.unpack_from("<II", cubin, position)
                (name,) = struct.unpack_from("<I", cubin, symbols + 24 * symbol)
                found[text(strings, name)] = value
            position += length
    return found
