"""Weights in the names and layouts of other libraries.

`timm` translates trees to timm's state dicts and back. `safetensors_file` opens and writes the
files that hold these.
"""
