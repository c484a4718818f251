// The page can do without this: a button for the theme, a crosshair, and tables that open for print.
(() => {
  const root = document.documentElement, button = document.getElementById('theme');
  button.hidden = false;
  const isDark = () => root.dataset.theme ? root.dataset.theme === 'dark' : matchMedia('(prefers-color-scheme: dark)').matches;
  const tell = () => { button.textContent = isDark() ? button.dataset.light : button.dataset.dark; };
  button.addEventListener('click', () => { root.dataset.theme = isDark() ? 'light' : 'dark'; tell(); });
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', tell);
  tell();
  let closed = [];
  addEventListener('beforeprint', () => { closed = [...document.querySelectorAll('details:not([open])')]; closed.forEach(each => { each.open = true; }); });
  addEventListener('afterprint', () => { closed.forEach(each => { each.open = false; }); closed = []; });
  for (const drawing of document.querySelectorAll('[data-tips]')) {
    const tips = drawing.dataset.tips.split('\n').map(line => line.split('\t'));
    const said = drawing.parentElement.querySelector('.tip'), plot = drawing.querySelector('.plot');
    const hair = document.createElement('div');
    hair.className = 'cross-hair'; hair.hidden = true; drawing.append(hair);
    let now = -1;
    const show = place => {
      now = Math.max(0, Math.min(tips.length - 1, place));
      const box = plot.getBoundingClientRect();
      hair.style.left = box.left - drawing.getBoundingClientRect().left + box.width * tips[now][0] / 1000 + 'px';
      hair.hidden = false; said.textContent = tips[now][1];
    };
    const hide = () => { hair.hidden = true; said.textContent = ''; now = -1; };
    drawing.addEventListener('pointermove', event => {
      const box = plot.getBoundingClientRect(), at = 1000 * (event.clientX - box.left) / box.width;
      let near = 0;
      tips.forEach((tip, place) => { if (Math.abs(tip[0] - at) < Math.abs(tips[near][0] - at)) near = place; });
      show(near);
    });
    drawing.addEventListener('pointerleave', hide);
    drawing.addEventListener('blur', hide);
    drawing.addEventListener('keydown', event => {
      const by = {ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10}[event.key];
      if (by) { show(now < 0 ? 0 : now + by); event.preventDefault(); }
      else if (event.key === 'Home') { show(0); event.preventDefault(); }
      else if (event.key === 'End') { show(tips.length - 1); event.preventDefault(); }
      else if (event.key === 'Escape') hide();
    });
  }
})();
