"""Model families: networks of the layers of this package, each in a package of its own."""
