"""Field bytes <-> Python values, and images. The only package that imports PIL and simplejpeg."""
