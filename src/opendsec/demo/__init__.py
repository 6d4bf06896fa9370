"""The demonstration: a real project's tests, in many sandboxes at once, before and after breaking half of them."""
