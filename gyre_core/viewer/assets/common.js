// Shared by the pages. Text enters the document through textContent and text nodes alone; nothing is ever parsed as HTML.

const $ = (selector, from = document) => from.querySelector(selector);

// An element: h("span", {class: "chip", title: "…", on: {click}}, "text", child, …). Strings become text nodes.
function h(tag, props = {}, ...children) {
  const svg = ["svg", "rect", "line", "text", "title", "g"].includes(tag);
  const element = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "on") for (const [event, handler] of Object.entries(value)) element.addEventListener(event, handler);
    else if (name === "vars") for (const [key, one] of Object.entries(value)) element.style.setProperty(key, one);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children.flat(Infinity)) if (child !== null && child !== undefined) element.append(child);
  return element;
}

// Control characters as pictures; marks that turn or hide text by their code points. What is shown is what is there.
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b\u200e\u200f\u2028\u2029\u202a-\u202e\u2060-\u2069\ufeff]/g;
function visible(text) {
  return String(text).replace(HIDDEN, (char) => {
    const code = char.codePointAt(0);
    if (code < 0x20) return String.fromCharCode(0x2400 + code);
    if (code === 0x7f) return "\u2421";
    return "⟦U+" + code.toString(16).toUpperCase().padStart(4, "0") + "⟧";
  });
}

const count = (number) => number.toLocaleString("en-US");
const short = (number) => (number < 10000 ? count(number) : number < 1e6 ? (number / 1e3).toFixed(1) + "k" : (number / 1e6).toFixed(2) + "M");
function seconds(value) {
  if (value < 0) return "−" + seconds(-value);
  if (value < 0.9995) return Math.round(value * 1000) + " ms";
  if (value < 100) return value.toFixed(value < 10 ? 2 : 1) + " s";
  return Math.floor(value / 60) + " min " + String(Math.round(value % 60)).padStart(2, "0") + " s";
}
const signed = (value) => (value < 0 ? "−" : "+") + Math.abs(value).toFixed(3);
const rewardText = (reward) => (reward === null || reward === undefined ? "none" : String(Math.round(reward * 1e4) / 1e4));

async function unpack(base64) {
  const text = atob(base64);
  const packed = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) packed[i] = text.charCodeAt(i);
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const bytes = new Uint8Array(await new Response(stream).arrayBuffer());
  const ascii = new TextDecoder();
  const size = Number(ascii.decode(bytes.subarray(0, 8)));
  const head = JSON.parse(ascii.decode(bytes.subarray(8, 8 + size)));
  const parts = {};
  for (const [name, [offset, length]] of Object.entries(head.sections)) {
    parts[name] = bytes.subarray(8 + size + offset, 8 + size + offset + length);
  }
  return { head, parts };
}

// The inverse of model.byte_planes.
function numbers(planes, width) {
  const size = planes.length / width;
  const values = new Uint32Array(size);
  for (let plane = 0; plane < width; plane++)
    for (let i = 0; i < size; i++) values[i] |= planes[plane * size + i] << (8 * plane);
  return values;
}

function themeButton() {
  const dark = () => (document.documentElement.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  return h("button", { class: "quiet", type: "button", title: "light or dark", "aria-label": "switch between light and dark", on: {
    click: () => { document.documentElement.dataset.theme = dark() ? "light" : "dark"; },
  } }, "◐");
}

// A reward's class and the sign that stands beside its colour.
function rewardKind(reward) {
  if (reward === null || reward === undefined) return ["none", "○"];
  return reward >= 1 ? ["full", "●"] : reward > 0 ? ["part", "◐"] : ["zero", "✕"];
}

function outcomeChip(outcome, reward) {
  const [kind, sign] = rewardKind(reward);
  return h("span", { class: "chip reward " + kind }, sign + " reward " + rewardText(reward), h("span", { class: "soft" }, " " + outcome));
}

async function start(show) {
  const app = $("#app");
  try {
    if (!("DecompressionStream" in window)) throw new Error("this browser has no DecompressionStream; use one of 2023 or later");
    const { head, parts } = await unpack($("#payload").textContent);
    $("#payload").remove();
    app.replaceChildren();
    show(app, head, parts);
    app.dataset.state = "ready";
  } catch (error) {
    app.dataset.state = "error";
    app.replaceChildren(h("p", { class: "loading" }, "This page could not be shown: " + error.message));
    throw error;
  }
}
