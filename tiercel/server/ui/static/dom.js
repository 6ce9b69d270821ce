// Helpers for the document. Text is inserted as text, never as markup.

/** Return the element with this id. */
export function byId(id) {
  return document.getElementById(id);
}

/** Return a new element with a class and text. */
export function element(name, className = '', text = '') {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text) made.textContent = text;
  return made;
}

/** Write text only if it differs, so that an unchanged snapshot costs nothing. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Return a number of children; existing ones are used again. */
export function fit(parent, count, make) {
  while (parent.childElementCount > count) parent.lastElementChild.remove();
  while (parent.childElementCount < count) parent.append(make());
  return parent.children;
}

/** Return the current value of a colour of the style sheet. */
export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

/** Call back when the colour scheme changes between light and dark. */
export function onScheme(changed) {
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', changed);
}
