"""What crosses a process boundary: frames, the codec for model values and errors, and the HTTP contract."""
