import pytest

from jenga.demo.memory import read_memory_log
from tests.demo.timelines import write_log


def test_read_memory_log_adds_the_tables_of_one_layer_type(tmp_path):
    timeline = read_memory_log(write_log(tmp_path / "log"))

    assert timeline.layer_types == ("mamba2", "full")
    assert [table.name for table in timeline.tables] == ["mamba2[0:1]", "mamba2[1:2]", "full"]
    assert timeline.steps[0].held_bytes == {"mamba2": 0, "full": 0}
    assert timeline.steps[1].request_tokens == {"a": 16}
    assert timeline.steps[1].needed_bytes == {"mamba2": 200, "full": 100}
    assert timeline.steps[1].held_bytes == {"mamba2": 254, "full": 127}


def test_read_memory_log_keeps_each_layers_bytes(tmp_path):
    full = read_memory_log(write_log(tmp_path / "log")).tables[2]

    assert [(layer.name, layer.slot_bytes) for layer in full.layers] == [("a0", 10), ("a1", 10)]
    assert (full.tokens_per_page, full.small_page_bytes, full.is_state) == (16, 320, False)


@pytest.mark.parametrize("text", ["", '{"step": 0}\n'], ids=["empty", "no_geometry"])
def test_read_memory_log_refuses_a_log_without_a_geometry(tmp_path, text):
    path = tmp_path / "log"
    path.write_text(text)

    with pytest.raises(ValueError, match="must begin with a geometry"):
        read_memory_log(path)
