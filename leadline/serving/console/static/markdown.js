// A little Markdown -> nodes. Text of a model only ever becomes text nodes.

const FENCE = /^ {0,3}(```+|~~~+)\s*([\w+#.-]*)/;
const INLINE = /(`+)(.+?)\1|\*\*(.+?)\*\*|\*(?=\S)(.+?)(?<=\S)\*|\[([^\]\n]+)\]\((https?:\/\/[^\s)]+)\)/s;

/** Show `text` in `parent`; blocks that did not change keep their nodes, and so a selection. */
export function show(parent, text) {
  const blocks = split(text);
  blocks.forEach((block, i) => {
    const source = block.join("\n");
    const old = parent.children[i];
    if (old?.source === source) return;
    const node = render(block);
    node.source = source;
    old ? old.replaceWith(node) : parent.append(node);
  });
  while (parent.children.length > blocks.length) parent.lastChild.remove();
}

/** Lines of each block: a fenced code block, or what stands between blank lines. */
function split(text) {
  const blocks = [];
  let block = [];
  let fence = null;
  const end = () => {
    if (block.length) blocks.push(block);
    block = [];
  };
  for (const line of text.split("\n")) {
    if (fence) {
      block.push(line);
      if (line.trim().startsWith(fence)) {
        fence = null;
        end();
      }
    } else if (FENCE.test(line)) {
      end();
      fence = FENCE.exec(line)[1];
      block.push(line);
    } else if (line.trim()) {
      const heading = /^#{1,6} /.test(line);
      if (heading) end();
      block.push(line);
      if (heading) end();
    } else {
      end();
    }
  }
  end();
  return blocks;
}

function render(lines) {
  const fence = FENCE.exec(lines[0]);
  if (fence) return code(fence, lines);
  const heading = /^(#{1,6}) (.*)/.exec(lines[0]);
  if (heading) return element(`h${Math.min(6, heading[1].length + 2)}`, ...inline(heading[2]));
  const item = /^\s*(?:[-*+]|(\d+)[.)]) +/;
  const list = item.exec(lines[0]);
  if (!list) return element("p", ...inline(lines.join("\n")));
  const items = [];
  for (const line of lines) {
    if (item.test(line)) items.push(line.replace(item, ""));
    else items[items.length - 1] += "\n" + line.trim();
  }
  const node = element(list[1] ? "ol" : "ul", ...items.map((text) => element("li", ...inline(text))));
  if (list[1]) node.start = Number(list[1]);
  return node;
}

function code([, mark, language], lines) {
  const closed = lines.length > 1 && lines.at(-1).trim().startsWith(mark);
  const text = lines.slice(1, closed ? -1 : undefined).join("\n");
  const copy = element("button", "Copy");
  copy.type = "button";
  copy.addEventListener("click", async () => {
    await navigator.clipboard.writeText(text);
    copy.textContent = "Copied";
    setTimeout(() => (copy.textContent = "Copy"), 1500);
  });
  const head = element("figcaption", element("span", language || "text"), copy);
  const pre = element("pre", element("code", text));
  pre.tabIndex = 0; // wide code scrolls, by keyboard too
  return element("figure", head, pre);
}

function* inline(text) {
  for (;;) {
    const match = INLINE.exec(text);
    if (!match) break;
    if (match.index) yield text.slice(0, match.index);
    const [whole, , code, strong, emphasis, label, href] = match;
    if (code !== undefined) yield element("code", code.trim() || code);
    else if (strong !== undefined) yield element("strong", ...inline(strong));
    else if (emphasis !== undefined) yield element("em", ...inline(emphasis));
    else yield link(label, href);
    text = text.slice(match.index + whole.length);
  }
  if (text) yield text;
}

function link(label, href) {
  const node = element("a", label);
  node.href = href;
  node.rel = "noreferrer noopener";
  node.target = "_blank";
  return node;
}

/** A new element; strings among the children become text nodes. */
export function element(name, ...children) {
  const node = document.createElement(name);
  node.append(...children);
  return node;
}
