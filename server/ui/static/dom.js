// The few things that every part does to the document. Text goes in as text: nothing here reads markup.

/** The element with this id. */
export function byId(id) {
  return document.getElementById(id);
}

/** A new element with a class and text. */
export function element(name, className = '', text = '') {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text) made.textContent = text;
  return made;
}

/** Write text where it differs, so that a picture that stands still costs nothing. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** As many children as wanted; what is there stays and is used again. */
export function fit(parent, count, make) {
  while (parent.childElementCount > count) parent.lastElementChild.remove();
  while (parent.childElementCount < count) parent.append(make());
  return parent.children;
}

/** A colour of the style sheet as it is now. */
export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

/** Call back when the reader wants light or dark from now on. */
export function onScheme(changed) {
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', changed);
}
