"""Environments: the embedded language tabletop, its experts, and fixed episode lists."""


def register_envs() -> None:
    """Make the tabletop ids (``wamlab/TabletopReach-v0``, ...) known to ``gymnasium.make``."""
    from wamlab.sim.tabletop import register_envs as register  # gymnasium is heavy

    register()
