// What is wrong with the page for people who read it with other means: a list of sentences.
() => {
  const said = [];
  const visible = (node) => node.getClientRects().length > 0;
  const colour = (text) => {
    const [r, g, b, a = 1] = text.match(/[\d.]+/g).map(Number);
    return { r, g, b, a };
  };
  const luminance = ({ r, g, b }) => {
    const [x, y, z] = [r, g, b].map((c) => (c /= 255) <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  };
  const ground = (node) => {
    for (; node; node = node.parentElement) {
      const found = colour(getComputedStyle(node).backgroundColor);
      if (found.a === 1) return found;
    }
    return { r: 255, g: 255, b: 255 };
  };
  for (const field of document.querySelectorAll("input:not([type=hidden]), select, textarea, progress"))
    if (!field.labels?.length && !field.ariaLabel) said.push(`no label: ${field.outerHTML.slice(0, 80)}`);
  for (const one of document.querySelectorAll("a, button"))
    if (!one.textContent.trim() && !one.ariaLabel) said.push(`no words: ${one.outerHTML.slice(0, 80)}`);
  for (const image of document.querySelectorAll("img")) if (!image.hasAttribute("alt")) said.push("no alt");
  if (document.querySelectorAll("h1").length !== 1) said.push("not one h1");
  if (!document.documentElement.lang || !document.title) said.push("no language or title");
  for (const table of document.querySelectorAll("table")) if (!table.querySelector("th")) said.push("no th");
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !visible(node) || node.closest("svg, noscript, script, option, .skip")) continue;
    const [a, b] = [luminance(colour(getComputedStyle(node).color)), luminance(ground(node))].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < 4.5) said.push(`contrast ${ratio.toFixed(1)}: ${walker.currentNode.data.trim().slice(0, 40)}`);
  }
  for (const part of document.querySelectorAll(".scroll"))
    if (part.scrollWidth > part.clientWidth) said.push(`pushed sideways: ${part.textContent.trim().slice(0, 40)}`);
  if (document.documentElement.scrollWidth > window.innerWidth) said.push("wider than the screen");
  return said;
}
