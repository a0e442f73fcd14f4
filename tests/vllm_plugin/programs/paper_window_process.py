"""Run an engine whose model has layers of a type from outside the package; see `engine_process`.

What `vllm.general_plugins` would call is called here, since the engine lives in this process. Its
page tables are written to a file that the environment names. The books are checked at every step.
"""

import json
import os
from pathlib import Path

from vllm import LLM, ModelRegistry

from docs.examples import paper_window_vllm
from tests.vllm_plugin.programs import engine_process
from tests.vllm_plugin.tiny.paper_window_model import PaperWindowLlama


def main():
    ModelRegistry.register_model("PaperWindowLlama", PaperWindowLlama)
    if "TABLES_FILE" in os.environ:
        paper_window_vllm.register()
    original = LLM.generate

    def generate(self, *args, **kwargs):
        tables = engine_process.scheduler_of(self).kv_cache_manager.manager.geometry.page_tables
        found = [[each.name, type(each.layer_type).__name__, len(each.layers)] for each in tables]
        Path(os.environ["TABLES_FILE"]).write_text(json.dumps(found))
        engine_process.check_each_step(self)
        return original(self, *args, **kwargs)

    LLM.generate = generate
    engine_process.main()


if __name__ == "__main__":
    main()
