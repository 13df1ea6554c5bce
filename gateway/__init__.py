"""sandgate's gateway: who may do what, in what order."""

__all__: list[str] = []
