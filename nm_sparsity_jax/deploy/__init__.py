"""Weights in the names and layouts of other libraries.

`timm` translates trees to timm's state dicts and back, and `huggingface` those of a T5 to the names
of transformers. `safetensors_file` opens and writes the files that hold these.
"""
