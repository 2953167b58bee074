"""Checks of the tiled w4a16 kernels, for steps of more than 8 tokens, on any backend.

A step of `chunk` rows is run with several numbers of real tokens: their rows against the float64
oracle, all others untouched, and rows bit-equal whatever the number of tokens beside them.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from w4a16_backend import Buffer, empty, run
from w4a16_cases import EPS, THETA
from w4a16_kernel_checks import SLOT, SLOTS, KernelChecks, cache_rows
from w4a16_oracle import (
    add_norm,
    from_bits,
    gated,
    head_norm,
    product,
    rotary,
    rounded,
    route,
    to_bits,
)

from inkrt.plugins.tactic import Pointer, Tactic
from inkrt.plugins.w4a16 import parts, tactics


@dataclass(slots=True)
class TileChecks(KernelChecks):
    """Runs the checks; `widths` are the numbers of real tokens, the largest last.

    Attributes:
        chunk: rows of the step.
    """

    chunk: int = 128

    def all(self) -> None:
        """Every check; an exception counts as a failed one."""
        d = self.dims
        self._try("tile linear", lambda: self.linear(rows=d.hidden, width=d.heads * 128))
        self._try("tile linear, odd rows", lambda: self.linear(rows=72, width=d.dense_width))
        ring = -(-self.chunk // 64) * 64
        for position in (0, 3 * ring - 5):
            self._try("tile qkv ring", lambda p=position: self.tile_qkv(ring, p))  # type: ignore[misc]
        self._try("tile qkv pages", lambda: self.tile_qkv(0, 60))
        for has_delta in (False, True):
            self._try("tile router", lambda x=has_delta: self.router(has_delta=x))  # type: ignore[misc]
        for kind in ("even", "skewed", "steps", "ties"):
            self._try("tile experts", lambda x=kind: self.experts(x))  # type: ignore[misc]
        self._try("tile dense", lambda: self.dense(has_delta=True))

    def _counts(
        self,
        name: str,
        tactic: Tactic,
        arguments: dict[str, Buffer],
        row_bytes: list[int],
    ) -> tuple[list[NDArray[np.uint8]], dict[str, Buffer]]:
        """Run with every number of tokens, twice with the last.

        Returns:
            The last run's valid rows and its scratch.
        """
        scratch: dict[str, Buffer] = {}
        kept: list[list[NDArray[np.uint8]]] = []
        counts = (*self.widths, self.widths[-1])
        for count in counts:
            outputs = [empty(self.backend, self.chunk * size) for size in row_bytes]
            known = {**arguments, "num_tokens": self.backend.upload(np.array([count], np.int32))}
            # Scratch outlives a launch.
            scratch = run(self.backend, tactic, known, outputs, scratch)
            rows = [self.backend.download(o).reshape(self.chunk, -1) for o in outputs]
            clean = all(bool((row[count:] == 0xFF).all()) for row in rows)
            self.report(f"{name} {count} tokens: other rows untouched", clean, "")
            kept.append([row[:count] for row in rows])
        for count, rows in zip(counts[:-1], kept[:-1], strict=True):
            same = all(
                np.array_equal(row, last[:count]) for row, last in zip(rows, kept[-1], strict=True)
            )
            self.report(f"{name} rows of {count} tokens equal those of {counts[-1]}", same, "")
        return kept[-1], scratch

    def linear(self, *, rows: int, width: int) -> None:
        """A plain product."""
        name, count = f"tile linear {rows}x{width}", self.widths[-1]
        weights, x = self._matrix(rows, width), self._bits(self.chunk, width)
        tactic = tactics.linear(self.dims, self.chunk, rows=rows, width=width)
        (y,), _ = self._counts(name, tactic, self._upload(x=x, w=weights), [rows * 2])
        expected = product(from_bits(x[:count]), weights)
        self._close(name, from_bits(y.view(np.uint16)), expected, 4e-3)

    def tile_qkv(self, ring: int, position: int) -> None:
        """Queries, residual and the cache rows: in pages without rotation, or a ring with it."""
        d, count = self.dims, self.widths[-1]
        name = f"tile qkv ring={ring} at {position}"
        heads, theta = d.heads + 2 * d.kv_heads, THETA if ring else None
        x, delta = self._bits(self.chunk, d.hidden, salt=1), self._bits(self.chunk, d.hidden)
        norm = self._bits(d.hidden, mean=1.0, scale=0.2, salt=3)
        q_norm = self._bits(128, mean=1.0, scale=0.2, salt=4)
        k_norm = self._bits(128, mean=1.0, scale=0.2, salt=5)
        weights = self._matrix(heads * 128, d.hidden, order="heads")
        table = np.array([SLOT], np.int32)
        num_pages = SLOTS * ring // 64
        if not ring:
            num_pages = (position + self.chunk) // 64 + 3
            table = np.random.default_rng(1).permutation(num_pages).astype(np.int32)
        caches = {
            cache: empty(self.backend, num_pages * d.kv_heads * 16384)
            for cache in ("k_cache", "v_cache")
        }
        arguments = self._upload(
            x=x, delta=delta, norm_weight=norm, w=weights, q_norm=q_norm, k_norm=k_norm,
            where=table, position=np.array([position], np.int32),
        )  # fmt: skip
        tactic = tactics.qkv(d, self.chunk, eps=EPS, rope_theta=theta, ring_rows=ring)
        (q, residual), _ = self._counts(
            name, tactic, {**arguments, **caches}, [d.heads * 256, d.hidden * 2]
        )
        expected_residual, z = add_norm(x[:count], delta[:count], norm, EPS)
        y = rounded(product(z, weights)).reshape(count, heads, 128)
        positions = position + np.arange(count)
        expected = np.split(y, [d.heads, d.heads + d.kv_heads], axis=1)
        expected[0] = head_norm(expected[0], q_norm, EPS)
        expected[1] = head_norm(expected[1], k_norm, EPS)
        if theta is not None:
            expected[:2] = [rotary(part, positions, theta) for part in expected[:2]]
        self._equal(f"{name} residual", residual.view(np.uint16), expected_residual)
        got = from_bits(q.view(np.uint16))
        self._close(f"{name} q", got, expected[0].reshape(count, -1), 4e-3)
        for (cache, buffer), values in zip(caches.items(), expected[1:], strict=True):
            bits = self.backend.download(buffer).view(np.uint16)
            rows, rest = cache_rows(bits, d.kv_heads, table, positions, ring)
            self._close(f"{name} {cache} rows", from_bits(rows), values, 4e-3)
            self.report(f"{name} {cache} other rows untouched", bool((rest == 0xFFFF).all()), "")

    def router(self, *, has_delta: bool) -> None:
        """Residual, norm, logits and the shared expert's activation."""
        d, count, name = self.dims, self.widths[-1], f"tile router delta={has_delta}"
        x, delta = self._bits(self.chunk, d.hidden, salt=1), self._bits(self.chunk, d.hidden)
        norm = self._bits(d.hidden, mean=1.0, scale=0.2, salt=3)
        router = self._bits(d.experts, d.hidden, scale=d.hidden**-0.5, salt=4)
        up = self._matrix(2 * d.shared_width, d.hidden, order="gated")
        arguments = self._upload(
            x=x, delta=delta, norm_weight=norm, router_weight=router, shared_gate_up=up
        )
        sizes = {
            "residual": d.hidden, "z": d.hidden, "logits": d.experts,
            "shared_hidden": d.shared_width,
        }  # fmt: skip
        arguments |= {name: empty(self.backend, 2 * self.chunk * n) for name, n in sizes.items()}
        names = {key: Pointer(key) for key in (*arguments, "shared_gate_up_scales")}
        tactic = parts.router(d, self.chunk, eps=EPS, has_delta=has_delta, names=names)
        self._counts(name, tactic, arguments, [])
        got = {
            key: self.backend.download(arguments[key]).view(np.uint16).reshape(self.chunk, n)
            for key, n in sizes.items()
        }
        for key, rows in got.items():
            clean = bool((rows[count:] == 0xFFFF).all())
            self.report(f"{name} {key}: other rows untouched", clean, "")
        residual, z = add_norm(x[:count], delta[:count] if has_delta else None, norm, EPS)
        self._equal(f"{name} residual", got["residual"][:count], residual)
        z_got = from_bits(got["z"][:count])
        self._close(f"{name} z", z_got, z, 1e-3)
        logits = from_bits(got["logits"][:count])
        self._close(f"{name} logits", logits, z_got @ from_bits(router).T, 4e-3)
        hidden = from_bits(got["shared_hidden"][:count])
        self._close(f"{name} shared", hidden, gated(rounded(product(z_got, up))), 5e-3)

    def experts(self, kind: str) -> None:
        """Choice, routed experts, and the sum; `kind` of logits: even, skewed, with ties, or steps.

        Steps: lists of the lengths around every multiple of 32, as far as tokens and experts go.
        """
        d, count, name = self.dims, self.widths[-1], f"tile experts, {kind}"
        z = self._bits(self.chunk, d.hidden, salt=1)
        logits = self._bits(self.chunk, d.experts, salt=2)
        if kind == "ties":  # the lowest index must win
            logits[:, 1::2] = logits[:, ::2]
        if kind == "skewed":  # a few experts have all tokens, most have none
            logits[:] = to_bits(8.0 - np.arange(d.experts) / 2)
        if kind == "steps":  # an expert is chosen by its first tokens, in front of the other half
            half = d.experts // 2
            ends = [length for n in range(32, count + 1, 32) for length in (n, n + 1, n - 1)]
            for expert, end in zip(range(half), ends, strict=False):
                logits[:, expert] = to_bits(np.where(np.arange(self.chunk) < end, 9.0, -9.0))
        shared_hidden = self._bits(self.chunk, d.shared_width, salt=3)
        up = self._matrix(d.experts, 2 * d.width, d.hidden, order="gated")
        down = self._matrix(d.experts, d.hidden, d.width)
        shared_down = self._matrix(d.hidden, d.shared_width)
        arguments = self._upload(
            z=z, logits=logits, shared_hidden=shared_hidden, gate_up=up, down=down,
            shared_down=shared_down,
        )  # fmt: skip
        tactic = parts.experts(
            d, self.chunk, names={n: Pointer(n) for n in ("z", "logits", "shared_hidden")}
        )
        (out,), scratch = self._counts(name, tactic, arguments, [d.hidden * 2])
        self._items(name, scratch, count * d.top_k)
        hidden = from_bits(self.backend.download(scratch["hidden"]).view(np.uint16))
        hidden = hidden.reshape(self.chunk, d.top_k, d.width)[:count]
        chosen, weights = route(logits[:count], d.top_k)
        x, expected = from_bits(z[:count]), np.empty_like(hidden)
        y = np.empty((count, d.top_k, d.hidden))
        for expert in np.unique(chosen):
            tokens, ranks = np.nonzero(chosen == expert)
            expected[tokens, ranks] = gated(product(x[tokens], up, int(expert)))
            y[tokens, ranks] = rounded(product(hidden[tokens, ranks], down, int(expert)))
        routed = (weights[:, :, None] * y).sum(axis=1)
        self._close(f"{name} hidden", hidden, expected, 4e-3)
        shared = rounded(product(from_bits(shared_hidden[:count]), shared_down))
        got = from_bits(out.view(np.uint16))
        self._close(f"{name} out", got, rounded(rounded(routed) + shared), 5e-3)

    def _items(self, name: str, scratch: dict[str, Buffer], num_pairs: int) -> None:
        """Every pair stands in one item, and those behind the items are empty."""
        items = self.backend.download(scratch["items"]).view(np.uint32).reshape(-1, 4)
        lists = self.backend.download(scratch["lists"]).view(np.int32).reshape(-1, self.chunk)
        used = int((items[:, 2] > 0).sum())
        pairs = [
            lists[expert, first : first + count]
            for expert, first, count, _ in items[:used].tolist()
        ]
        self.report(f"{name} items come first", not items[used:].any(), "")
        once = np.array_equal(np.sort(np.concatenate(pairs)), np.arange(num_pairs))
        self.report(f"{name} every pair in one item", once, "")
        self.report(f"{name} length of items", items[:, 2].max() <= 64, "")

    def dense(self, *, has_delta: bool) -> None:
        """The MLP of a dense layer."""
        d, count = self.dims, self.widths[-1]
        x, delta = self._bits(self.chunk, d.hidden, salt=1), self._bits(self.chunk, d.hidden)
        norm = self._bits(d.hidden, mean=1.0, scale=0.2, salt=3)
        up = self._matrix(2 * d.dense_width, d.hidden, order="gated")
        down = self._matrix(d.hidden, d.dense_width)
        arguments = self._upload(x=x, delta=delta, norm_weight=norm, gate_up=up, down=down)
        tactic = tactics.dense_mlp(self.dims, self.chunk, eps=EPS, has_delta=has_delta)
        (out, residual), _ = self._counts(
            "tile dense", tactic, arguments, [d.hidden * 2, d.hidden * 2]
        )
        expected, z = add_norm(x[:count], delta[:count] if has_delta else None, norm, EPS)
        self._equal("tile dense residual", residual.view(np.uint16), expected)
        middle = gated(rounded(product(z, up)))
        got = from_bits(out.view(np.uint16))
        self._close("tile dense out", got, rounded(product(middle, down)), 1e-2)
