"""The Megatron back end: the only folder that imports megatron (megatron-core 0.16.1, private names: pin exactly).

`backend.MegatronTrainer` is the entry point; importing this package alone imports neither torch nor megatron.
"""
