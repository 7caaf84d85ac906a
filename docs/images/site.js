// A wide table scrolls in a box of the theme. While it does, the keyboard can focus the box and scroll it.
const BOXES = ".md-typeset__scrollwrap, .md-typeset__table, .md-typeset pre, .md-typeset pre > code";

function markBoxes() {
  for (const box of document.querySelectorAll(BOXES)) {
    const scrolls = box.scrollWidth > box.clientWidth && /auto|scroll/.test(getComputedStyle(box).overflowX);
    if (scrolls) box.tabIndex = 0;
    else box.removeAttribute("tabindex");
  }
}

new MutationObserver(markBoxes).observe(document.body, { childList: true, subtree: true });
addEventListener("resize", markBoxes);
addEventListener("load", markBoxes);
