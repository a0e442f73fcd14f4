"""Models that vLLM does not have, as vLLM's model classes, for the backend or for stock vLLM.

The contract of a model here:

- It is a module with one class that vLLM loads, named after the architecture in `config.json`, and
  a row in `registered_models`. vLLM imports the module only when a checkpoint names the class.
- The class reads a published checkpoint: its configuration, and its weights by their names.
- Layers with a cache are vLLM's own (`Attention` and others). The plugin serves them as in vLLM's
  models.
- A reader in `jenga.models` reads the same configuration. `jenga plan` and the engine must find the
  same layers; both call the same checks where a field can be wrong.
- A feature that the class cannot serve is refused by name when it is built, before weights are
  loaded.
"""
