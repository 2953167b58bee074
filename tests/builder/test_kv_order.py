"""Attention that reads the step's own keys from the cache stands behind their write, or nowhere."""

import pytest
from small_model import VERIFY3, small_graph

from inkrt.builder import tactics
from inkrt.builder.kv_order import is_written_first
from inkrt.builder.passes.fuse_qkv_post import fuse_qkv_post
from inkrt.builder.rewrite import calls
from inkrt.builder.tactics import TacticChooser, choose_tactic
from inkrt.errors import BuildError
from inkrt.plugins.registry import plugins
from inkrt.plugins.tactic import Tactic


def test_attention_in_front_of_the_write_has_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tactics, "find_tactics", lambda *_: [Tactic("any", (), 1, 1)])
    plugin, chooser = plugins()["relative_attention"], TacticChooser("sm_90a")
    graph = small_graph(VERIFY3, 1)
    before = calls(graph.module.graph, "relative_attention")
    assert [is_written_first(node) for node in before] == [False] * 3
    with pytest.raises(BuildError) as caught:
        choose_tactic(before[0], plugin, "sm_90a", chooser)
    assert str(caught.value) == (
        "layers.0.attn: ink::relative_attention on sm_90a reads the step's own keys from the "
        "cache, but they are written behind it; write the module such that a pass fuses what makes "
        "them, or build for the cpu"
    )
    after = calls(fuse_qkv_post(graph).module.graph, "relative_attention")
    assert [is_written_first(node) for node in after] == [True] * 3
    assert choose_tactic(after[0], plugin, "sm_90a", chooser).name == "any"
