"""Makes this folder a package: gin looks on sys.path too, and fails on other folders."""
