"""Checks of the w4a16 kernels against the float64 oracle, on any backend.

For every kernel: outputs poisoned first; all rows of the widest step against the oracle; rows of
every narrower step bit-equal to it; a second run and every other tactic bit-equal to the first;
cache rows that no token owns untouched. Sizes are small or the model's; the code is the same.
"""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray
from w4a16_backend import Buffer, empty, run
from w4a16_cases import EPS, HEAD_CASES, MOE_CASES, MOST, linear_cases, qkv_cases
from w4a16_kernel_checks import SLOT, SLOTS, KernelChecks, cache_rows
from w4a16_oracle import (
    Bits,
    add_norm,
    from_bits,
    gated,
    head_norm,
    product,
    rotary,
    rounded,
    route,
)

from inkrt.plugins.tactic import Tactic
from inkrt.plugins.w4a16 import tactics
from inkrt.plugins.w4a16.shapes import Dims


class Checks(KernelChecks):
    """Of the kernels for steps of 1 to 8 tokens."""

    def all(self) -> None:
        """Every check; an exception counts as a failed one."""
        self._try("embed", self.embed)
        for case in qkv_cases(self.dims):
            self._try(f"qkv {case}", partial(self.qkv, **case))
        for sizes in linear_cases(self.dims):
            self._try(f"linear {sizes}", partial(self.linear, **sizes))
        for case in MOE_CASES:
            self._try(f"moe {case}", partial(self.moe, **case, ties=not case["has_delta"]))
        self._try("dense", partial(self.dense, has_delta=True))
        for parts in HEAD_CASES:
            self._try(f"lm_head {parts}", partial(self.lm_head, **parts))

    # ---- running ----

    def _widths(
        self,
        name: str,
        find: Callable[[int], Tactic],
        arguments: dict[str, Buffer],
        row_bytes: Sequence[int],
        others: Callable[[int], Sequence[Tactic]] = lambda _: (),
    ) -> tuple[list[NDArray[np.uint8]], dict[str, Buffer]]:
        """Run every T; check invariance and repeatability; gives outputs [8, row] and scratch.

        `others` gives tactics of a T that must have the same bits.
        """
        results: list[tuple[int, list[NDArray[np.uint8]]]] = []
        scratch: dict[str, Buffer] = {}
        for width in (*self.widths, self.widths[-1]):
            outputs = [empty(self.backend, MOST * size) for size in row_bytes]
            repeated = bool(results) and results[-1][0] == width
            known = scratch if repeated else None  # scratch outlives a launch
            scratch = run(self.backend, find(width), arguments, outputs, known)
            rows = [self.backend.download(o).reshape(MOST, -1) for o in outputs]
            results.append((width, rows))
            if "error" in scratch:
                word = self.backend.download(scratch["error"])
                if word.any():
                    self.report(f"{name} T={width} error word", False, str(word.tolist()))
        last = results[-1][1]
        for width, rows in results[:-1]:
            same = all(
                np.array_equal(row[:width], other[:width])
                for row, other in zip(rows, last, strict=True)
            )
            clean = all(bool((row[width:] == 0xFF).all()) for row in rows)
            what = "repeated" if width == results[-1][0] else "rows equal those of T=8"
            self.report(f"{name} T={width} {what}", same and clean, "" if clean else "wrote past T")
        for width in (self.widths[0], self.widths[-1]):
            for other in others(width):
                outputs = [empty(self.backend, MOST * size) for size in row_bytes]
                run(self.backend, other, arguments, outputs)
                rows = [self.backend.download(o).reshape(MOST, -1)[:width] for o in outputs]
                same = all(np.array_equal(a, b[:width]) for a, b in zip(rows, last, strict=True))
                self.report(f"{name} T={width} {other.name} has the same bits", same, "")
        return last, scratch

    # ---- kernels ----

    def embed(self) -> None:
        """Rows of the table, exact."""
        d = self.dims
        vocab = min(d.vocab, 4096)
        table = self._bits(vocab, d.hidden)
        tokens = np.array([0, vocab - 1, 5, 5, 17, 1, 2, 3], np.int32)
        (out,), _ = self._widths(
            "embed",
            lambda t: tactics.embed(Dims(hidden=d.hidden, vocab=vocab), t),
            self._upload(tokens=tokens, table=table),
            [d.hidden * 2],
        )
        self._equal("embed rows", out.view(np.uint16), table[tokens])

    def qkv(
        self, *, blocks: int | None, ring: int, theta: float | None, position: int, valid: int
    ) -> None:
        """Queries, residual and the cache pages."""
        d = self.dims
        name = f"qkv blocks={blocks} ring={ring} rope={theta is not None} at {position}"
        heads = d.heads + 2 * d.kv_heads
        weights = self._matrix(heads * 128, d.hidden, order="heads")
        x, delta = self._bits(MOST, d.hidden, salt=1), self._bits(MOST, d.hidden, salt=2)
        norm = self._bits(d.hidden, mean=1.0, scale=0.2, salt=3)
        q_norm = self._bits(128, mean=1.0, scale=0.2, salt=4)
        k_norm = self._bits(128, mean=1.0, scale=0.2, salt=5)
        pages = SLOTS * ring // 64 if ring else 7
        table = np.array([3, 6, 0, 5], np.int32) if not ring else np.array([SLOT], np.int32)
        page_bytes = d.kv_heads * 16384

        def find(t: int, number: int | None = blocks) -> Tactic:
            return tactics.qkv(d, t, eps=EPS, rope_theta=theta, ring_rows=ring, blocks=number)

        arguments = self._upload(
            x=x, delta=delta, norm_weight=norm, w=weights, q_norm=q_norm, k_norm=k_norm,
            where=table, position=np.array([position], np.int32),
        )  # fmt: skip
        caches = {}
        for width in self.widths:
            step = {
                "k_cache": empty(self.backend, pages * page_bytes),
                "v_cache": empty(self.backend, pages * page_bytes),
                "num_tokens": self.backend.upload(np.array([min(valid, width)], np.int32)),
            }
            outputs = [
                empty(self.backend, MOST * d.heads * 256),
                empty(self.backend, MOST * d.hidden * 2),
            ]
            run(self.backend, find(width), {**arguments, **step}, outputs)
            caches[width] = [
                self.backend.download(step[cache]).view(np.uint16)
                for cache in ("k_cache", "v_cache")
            ]
        step = {
            "k_cache": empty(self.backend, pages * page_bytes),
            "v_cache": empty(self.backend, pages * page_bytes),
            "num_tokens": self.backend.upload(np.array([valid], np.int32)),
        }
        (q, residual), _ = self._widths(
            name, find, {**arguments, **step}, [d.heads * 256, d.hidden * 2],
            lambda t: [find(t, other) for other in tactics.qkv_blocks(d, t) if other != blocks],
        )  # fmt: skip

        expected_residual, z = add_norm(x, delta, norm, EPS)
        y = rounded(product(z, weights)).reshape(MOST, heads, 128)
        positions = position + np.arange(MOST)
        parts = np.split(y, [d.heads, d.heads + d.kv_heads], axis=1)
        parts[0] = head_norm(parts[0], q_norm, EPS)
        parts[1] = head_norm(parts[1], k_norm, EPS)
        if theta is not None:
            parts[:2] = [rotary(part, positions, theta) for part in parts[:2]]
        self._equal(f"{name} residual", residual.view(np.uint16), expected_residual)
        self._close(f"{name} q", from_bits(q.view(np.uint16)), parts[0].reshape(MOST, -1), 4e-3)
        for width, both in caches.items():
            count = min(valid, width)
            for cache, bits, values in zip("kv", both, parts[1:], strict=True):
                got, rest = cache_rows(bits, d.kv_heads, table, positions[:count], ring)
                self._close(f"{name} T={width} {cache} rows", from_bits(got), values[:count], 4e-3)
                clean = bool((rest == 0xFFFF).all())
                self.report(f"{name} T={width} {cache} other rows untouched", clean, "")
                wide = cache_rows(
                    caches[MOST][cache == "v"], d.kv_heads, table, positions[:count], ring
                )
                self._equal(f"{name} T={width} {cache} rows equal those of T=8", got, wide[0])

    def linear(self, *, rows: int, width: int) -> None:
        """A plain product."""
        name = f"linear {rows}x{width}"
        weights = self._matrix(rows, width)
        x = self._bits(MOST, width)
        (y,), _ = self._widths(
            name,
            lambda t: tactics.linear(self.dims, t, rows=rows, width=width),
            self._upload(x=x, w=weights),
            [rows * 2],
        )
        expected = product(from_bits(x), weights)
        self._close(name, from_bits(_bits_of(y, rows)), expected, 4e-3)

    def moe(self, *, has_delta: bool, ties: bool) -> None:
        """Router, experts and the sum, each stage on the kernels' own inputs to it."""
        d = self.dims
        name = f"moe delta={has_delta} ties={ties}"
        x, delta = self._bits(MOST, d.hidden, salt=1), self._bits(MOST, d.hidden, salt=2)
        norm = self._bits(d.hidden, mean=1.0, scale=0.2, salt=3)
        router = self._bits(d.experts, d.hidden, scale=d.hidden**-0.5, salt=4)
        if ties:  # equal logits, so that the lowest index must win
            router[1::2] = router[::2]
        shared_up = self._matrix(2 * d.shared_width, d.hidden, order="gated")
        up = self._matrix(d.experts, 2 * d.width, d.hidden, order="gated")
        down = self._matrix(d.experts, d.hidden, d.width)
        shared_down = self._matrix(d.hidden, d.shared_width)
        arguments = self._upload(
            x=x, delta=delta, norm_weight=norm, router_weight=router, shared_gate_up=shared_up,
            gate_up=up, down=down, shared_down=shared_down,
        )  # fmt: skip
        (out, residual), scratch = self._widths(
            name,
            lambda t: tactics.moe(d, t, eps=EPS, has_delta=has_delta),
            arguments,
            [d.hidden * 2, d.hidden * 2],
        )

        def stage(key: str, width: int) -> Bits:
            return self.backend.download(scratch[key]).view(np.uint16).reshape(MOST, width)

        expected_residual, z = add_norm(x, delta if has_delta else None, norm, EPS)
        z_got = from_bits(stage("z", d.hidden))
        self._equal(f"{name} residual", residual.view(np.uint16), expected_residual)
        self._close(f"{name} z", z_got, z, 1e-3)
        logits = stage("logits", d.experts)
        self._close(f"{name} logits", from_bits(logits), z_got @ from_bits(router).T, 4e-3)
        hidden_shared = from_bits(stage("shared_hidden", d.shared_width))
        expected = gated(rounded(product(z_got, shared_up)))
        self._close(f"{name} shared hidden", hidden_shared, expected, 5e-3)

        experts, weights = route(logits, d.top_k)
        hidden = from_bits(stage("hidden", d.top_k * d.width)).reshape(MOST, d.top_k, d.width)
        expected_hidden = np.empty_like(hidden)
        routed = np.zeros((MOST, d.hidden))
        for token, rank in np.ndindex(MOST, d.top_k):
            expert = int(experts[token, rank])
            expected_hidden[token, rank] = gated(product(z_got[token], up, expert))
            y = rounded(product(hidden[token, rank], down, expert))
            routed[token] += weights[token, rank] * y
        self._close(f"{name} hidden", hidden, expected_hidden, 4e-3)
        shared = rounded(product(hidden_shared, shared_down))
        expected = rounded(rounded(routed) + shared)
        self._close(f"{name} out", from_bits(out.view(np.uint16)), expected, 5e-3)

    def dense(self, *, has_delta: bool) -> None:
        """The MLP of a dense layer."""
        d = self.dims
        x, delta = self._bits(MOST, d.hidden, salt=1), self._bits(MOST, d.hidden, salt=2)
        norm = self._bits(d.hidden, mean=1.0, scale=0.2, salt=3)
        up = self._matrix(2 * d.dense_width, d.hidden, order="gated")
        down = self._matrix(d.hidden, d.dense_width)
        arguments = self._upload(x=x, delta=delta, norm_weight=norm, gate_up=up, down=down)
        (out, residual), scratch = self._widths(
            "dense",
            lambda t: tactics.dense_mlp(d, t, eps=EPS, has_delta=has_delta),
            arguments,
            [d.hidden * 2, d.hidden * 2],
        )
        expected_residual, z = add_norm(x, delta, norm, EPS)
        self._equal("dense residual", residual.view(np.uint16), expected_residual)
        middle = self.backend.download(scratch["middle"]).view(np.uint16).reshape(MOST, -1)
        self._close("dense middle", from_bits(middle), gated(rounded(product(z, up))), 1e-2)
        expected = rounded(product(from_bits(middle), down))
        self._close("dense out", from_bits(out.view(np.uint16)), expected, 4e-3)

    def lm_head(self, *, logits: bool, greedy: bool, norm: bool) -> None:
        """Logits against the oracle; the token exactly, from the logits."""
        d = self.dims
        name = f"lm_head logits={logits} greedy={greedy} norm={norm}"
        x, delta = self._bits(MOST, d.hidden, salt=1), self._bits(MOST, d.hidden, salt=2)
        weight = self._bits(d.hidden, mean=1.0, scale=0.2, salt=3)
        head = self._matrix(d.vocab, d.hidden)
        # Twin rows: ties must go to the lower id.
        half = d.vocab // 2
        head.codes[half : 2 * half] = head.codes[:half]
        if head.scales is not None:
            head.scales[half : 2 * half] = head.scales[:half]
        arguments = self._upload(x=x, delta=delta, norm_weight=weight, w=head)

        def find(t: int, depth: int | None = None) -> Tactic:
            return tactics.lm_head(
                d, t, eps=EPS, logits=logits, greedy=greedy, norm=norm, depth=depth
            )

        (tokens, out), _ = self._widths(
            name,
            find,
            arguments,
            [4, d.vocab * 4],
            lambda t: [find(t, depth) for depth in tactics.head_depths(d)],
        )
        z = add_norm(x, delta, weight, EPS)[1] if norm else from_bits(x)
        expected = product(z, head)
        if logits:
            values = out.view(np.float32).astype(np.float64)
            self._close(f"{name} logits", values, expected, 5e-4)
            expected = values
        if greedy and logits:
            best = expected.argmax(axis=-1).astype(np.int32)
            self._equal(f"{name} tokens", tokens.view(np.int32)[:, 0], best)
        elif greedy:
            chosen = np.take_along_axis(expected, tokens.view(np.int32).astype(np.int64), -1)
            short = float((expected.max(axis=-1, keepdims=True) - chosen).max())
            lower = bool((tokens.view(np.int32) < half).all()) or d.vocab % 2 == 1
            self.report(
                f"{name} tokens", short <= 1e-4 and lower, f"short of the best by {short:.1e}"
            )


def _bits_of(rows: NDArray[np.uint8], width: int) -> Bits:
    """A [8, width] bf16 output that was written with row stride `width`."""
    return rows.view(np.uint16).reshape(MOST, width)
