// Parts of a page are replaced when their text changes: this keeps the focus and what is open. Cells of the fleet are
// one stop of the Tab key; arrow keys move between them. A chosen file is put into its field.
(() => {
  const opened = new Set();
  let focused = null;
  const selector = part => part.id ? `#${CSS.escape(part.id)}`
    : part.getAttribute('href') ? `main a[href="${CSS.escape(part.getAttribute('href'))}"]` : null;
  const describe = part => {
    const readout = part.closest('.fleet')?.querySelector('.readout');
    if (readout) readout.textContent = part.title;
  };
  addEventListener('pointerdown', () => { focused = null; }, true);
  addEventListener('focusin', event => {
    focused = selector(event.target);
    if (event.target.matches('.cell')) describe(event.target);
  });
  addEventListener('mouseover', event => { if (event.target.matches?.('.cell')) describe(event.target); });
  addEventListener('toggle', event => {
    if (event.target.id) event.target.open ? opened.add(event.target.id) : opened.delete(event.target.id);
  }, true);
  addEventListener('keydown', event => {
    const step = {ArrowRight: 1, ArrowLeft: -1, ArrowDown: 1, ArrowUp: -1}[event.key];
    if (!step || !event.target.matches('.cell')) return;
    const cells = [...event.target.closest('.fleet').querySelectorAll('.cell')], here = event.target;
    let place = cells.indexOf(here) + step;
    if (event.key === 'ArrowDown' || event.key === 'ArrowUp') {
      const {offsetLeft: left, offsetTop: top} = here;
      while (cells[place] && (cells[place].offsetTop === top || cells[place].offsetLeft < left - 2 * here.offsetWidth
        || cells[place].offsetLeft > left)) place += step;
    }
    if (!cells[place]) return;
    here.tabIndex = -1;
    cells[place].tabIndex = 0;
    cells[place].focus();
    event.preventDefault();
  });
  addEventListener('change', async event => {
    const {files, dataset} = event.target, area = document.getElementById(dataset.into);
    if (!files?.length || !area) return;
    area.value = await files[0].text();
    area.dispatchEvent(new Event('input', {bubbles: true}));
  });
  new MutationObserver(() => {
    for (const id of opened) document.getElementById(id)?.setAttribute('open', '');
    if (focused && document.activeElement === document.body) {
      const part = document.querySelector(focused);
      if (part?.matches('.cell')) part.tabIndex = 0;
      part?.focus({preventScroll: true});
    }
  }).observe(document.documentElement, {childList: true, subtree: true});
})();
