"""FnCalls on a node: pools of warm, locked-down containers, what runs in them, and which GPU they hold.

`base.FnCalls` is all the edge knows of it.
"""
