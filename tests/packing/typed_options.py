"""Calls that mypy checks (`make lint`) and that never run: the keyword arguments have the types of the options. An
`ignore` without an error of this kind is an error.
"""

import wdskit

result: wdskit.PackResult = wdskit.pack("photos", "out", max_samples=3, export="timm")
wdskit.pack("photos", "out", max_samples="3")  # type: ignore[arg-type]
wdskit.reshard("in", "out", fliter="cls == 1")  # type: ignore[call-arg]
wdskit.select("in", "large", sample="10%", workers=2)
