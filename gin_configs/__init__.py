"""A package so that gin, which looks on sys.path too, does not trip over a folder that is none."""
