"""GLUE, mini-GLUE and WMT as seqio tasks, in T5's text format and with T5's metrics.

    import t5x_tasks                        # registers all of them; in T5X:
    MIXTURE_OR_TASK_MODULE = 't5x_tasks'

    nm_glue_<config>               TFDS, or GLUE's TSV folder
    nm_glue_mini_<config>          made from a seed, nothing to download
    nm_wmt17_ende, nm_wmt14_ende   TFDS, or two text files

Mixtures: nm_glue_proportional, nm_glue_mnli_and_dev, and nm_glue_mini_* alike.

`register_glue`, `register_mini` and `register_wmt` register them again, with another vocabulary or
source. Nothing is read, made or downloaded before a dataset is asked for. See docs/tasks.md.
"""

from t5x_tasks.glue import register_glue, register_mini
from t5x_tasks.wmt import register_wmt

__all__ = ["register_glue", "register_mini", "register_wmt"]

register_glue()
register_mini()
register_wmt()
