"""Shows gin where gin_configs/ lies, as soon as a gin file imports this module.

    from nm_sparsity_jax.integrations.gin_files import search

So T5X's programs need no --gin_search_paths for files of this package: gin itself finds
nm_sparsity_jax/finetune.gin, as it finds t5x/configs/runs/finetune.gin, and this line is in it.
"""

from gin import config

from nm_sparsity_jax.integrations.gin_files.folders import folder

config.add_config_file_search_path(str(folder()))
