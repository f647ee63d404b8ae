"""The commands of ``lowbit``: each module has ``add(commands)``, which adds its parser and sets ``run``."""
