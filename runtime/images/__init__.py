"""Images of requests: from encoded bytes to the patches that a vision tower reads.

`request.open_images` is the way in. NumPy and Pillow only; Pillow is imported when the first image
is opened.
"""
