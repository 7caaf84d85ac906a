"""Convert field bytes to Python values and back, and read images. The only package that imports PIL and simplejpeg."""
