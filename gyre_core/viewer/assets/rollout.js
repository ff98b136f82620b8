// One rollout: header, timeline, outline of the tree. Rows are made once as empty boxes and filled when they come near
// the window; texts are put together from the pieces of their tokens when a row is opened or searched.

const CHUNK = 4000; // tokens of a text that are shown at first
const SHAPE = { main: "M", "main-summary": "MS", "sub-agent": "S", "sub-agent-summary": "SS", aux: "A" };
const CLASSES = {
  clean: "strict append to recorded tokens",
  respliced: "the texts differ in form only; the recorded tokens stand in",
  forked: "the meaning differs; rendered anew from where the tokens diverge",
  synthetic: "holds an assistant message that nobody sampled (context, never a target)",
};
const ENDS = { stop: "a stop token was sampled", length: "cut by a length limit", abort: "stopped from outside; the partial output is kept" };
const MARK = { respliced: "≈", forked: "⎇", synthetic: "✎", length: "⇥", abort: "⊘" };

class RolloutPage {
  constructor(app, head, parts) {
    Object.assign(this, { app, head, nodes: head.nodes, calls: head.calls, layout: head.outline });
    this.readTokens(parts);
    this.readTree();
    this.open = new Set();
    this.folded = new Set();
    this.tokenView = new Set();
    this.whole = new Set(); // texts shown beyond CHUNK
    this.filters = new Map(); // kind -> Set of values
    this.branch = null;
    this.found = [];
    this.query = "";
    const size = this.nodes.size;
    if (size.length <= 60) size.forEach((tokens, node) => tokens <= 200 && this.nodes.sampled[node] && this.open.add(node));
    app.append(this.header(), this.panels(), this.timeline(), this.toolbar(), this.tree());
    this.update();
    this.items.slice(0, 60).forEach((item) => this.fill(item));
    addEventListener("hashchange", () => this.follow());
    document.addEventListener("keydown", (event) => this.key(event));
    this.follow();
  }

  readTokens(parts) {
    const { head, nodes } = this;
    this.tokens = numbers(parts.tokens, 3);
    this.logprobs = numbers(parts.logprobs, 2);
    this.pieceIds = numbers(parts.piece_ids, 4);
    const sizes = numbers(parts.piece_sizes, 2);
    this.pieces = [];
    let offset = 0;
    for (const size of sizes) this.pieces.push(parts.pieces.subarray(offset, (offset += size)));
    this.special = new Set(head.special);
    this.first = []; // index of each node's first token, and of its first log-prob
    this.firstLogprob = [];
    let token = 0, logprob = 0;
    nodes.size.forEach((size, node) => {
      this.first.push(token);
      this.firstLogprob.push(logprob);
      token += size;
      if (nodes.sampled[node]) logprob += size;
    });
    this.lower = [];
  }

  readTree() {
    const { nodes, calls } = this;
    this.kids = nodes.size.map(() => []);
    nodes.parent.forEach((parent, node) => parent >= 0 && this.kids[parent].push(node));
    // The call that a prompt's tokens were first sent for: of the first sampled node below it.
    this.cause = nodes.call.slice();
    for (let node = nodes.size.length - 1; node >= 0; node--) {
      const parent = nodes.parent[node];
      if (parent < 0 || nodes.sampled[parent] || this.cause[node] < 0) continue;
      if (this.cause[parent] < 0 || this.cause[node] < this.cause[parent]) this.cause[parent] = this.cause[node];
    }
    this.callOfId = new Map(calls.map((call, index) => [call.id, index]));
    this.trainedCount = nodes.trained.map((runs) => runs.reduce((sum, [from, to]) => sum + to - from, 0));
  }

  path(node) {
    const path = new Set();
    for (; node >= 0; node = this.nodes.parent[node]) path.add(node);
    return path;
  }

  bytes(node, from = 0, to = this.nodes.size[node]) {
    const start = this.first[node];
    let size = 0;
    for (let i = start + from; i < start + to; i++) size += this.pieces[this.tokens[i]].length;
    const all = new Uint8Array(size);
    let offset = 0;
    for (let i = start + from; i < start + to; i++) {
      const piece = this.pieces[this.tokens[i]];
      all.set(piece, offset);
      offset += piece.length;
    }
    return all;
  }

  text(node, from, to) {
    return new TextDecoder().decode(this.bytes(node, from, to));
  }

  // ------------------------------------------------------------------------------------------------ header, panels

  header() {
    const { spec, grade } = this.head;
    const advantage = this.head.branches[0]?.advantage;
    return h("header", {},
      h("div", { class: "brand" }, "gyre", h("span", { class: "soft" }, " rollout")),
      h("h1", {}, visible(spec.rollout)),
      h("div", { class: "chips" },
        outcomeChip(grade.outcome, grade.reward),
        advantage === undefined ? h("span", { class: "chip" }, "not trained") : h("span", { class: "chip" }, "advantage " + signed(advantage)),
        h("span", { class: "chip" }, spec.step >= 0 ? "step " + (spec.step + 1) : "held-out"),
        h("span", { class: "chip" }, "problem " + visible(spec.problem)),
        h("span", { class: "chip" }, "policy v" + spec.version),
        this.head.run ? h("span", { class: "chip soft" }, "run " + visible(this.head.run)) : null),
      h("div", { class: "tools" },
        h("button", { class: "quiet", type: "button", title: "keyboard (?)", "aria-label": "keyboard help", on: { click: () => this.help() } }, "?"),
        themeButton()));
  }

  panels() {
    const { grade, harness, totals, head } = { ...this.head, head: this.head };
    const list = (pairs) => h("dl", {}, pairs.filter(([, value]) => value !== "" && value !== null && value !== undefined)
      .map(([name, value]) => [h("dt", {}, visible(name)), h("dd", {}, value instanceof Node ? value : visible(value))]));
    const panel = (title, ...content) => h("section", { class: "panel" }, h("h2", {}, title), ...content);
    const counts = (record) => Object.entries(record).map(([name, number]) => `${name} ${count(number)}`).join(" · ");
    const saved = totals.branch_tokens ? 1 - totals.unique_tokens / totals.branch_tokens : 0;
    const dropped = head.dropped_reason ? ["group dropped", head.dropped_reason] : ["", ""];
    return h("div", { class: "panels" },
      panel("Reward", h("p", { class: "reason" }, visible(grade.reason)),
        list([["verifier", `${grade.attempts} attempt${grade.attempts === 1 ? "" : "s"}, ${seconds(grade.seconds)}`], dropped,
          ...Object.entries(grade.metrics).map(([name, value]) => [name, String(Math.round(value * 1e4) / 1e4)])]),
        this.groupStrip()),
      panel("Tokens", list([
        ["in the tree", count(totals.unique_tokens)],
        ["sampled", `${count(totals.sampled_tokens)} (${percent(totals.sampled_tokens, totals.unique_tokens)})`],
        ["trained", `${count(totals.trained_tokens)} (${percent(totals.trained_tokens, totals.sampled_tokens)} of sampled)`],
        ["branches", `${count(totals.branches)}; flat they hold ${count(totals.branch_tokens)} (sharing saves ${Math.round(saved * 100)} %)`],
        ["sampled by", Object.entries(totals.versions).map(([version, number]) => `v${version}: ${count(number)}`).join(" · ")],
      ])),
      panel("Calls", list([
        ["calls", count(totals.calls)],
        ["dialect", [...new Set(this.calls.map((call) => call.dialect))].join(", ")],
        ["model asked for", [...new Set(this.calls.map((call) => call.model))].join(", ")],
        ["prompts", counts(totals.substitutions)],
        ["ended by", counts(totals.finish_reasons)],
      ]), Object.keys(head.counters).length ? h("details", {}, h("summary", {}, "counters"),
        list(Object.entries(head.counters).sort().map(([name, number]) => [name, count(number)]))) : null),
      panel("Harness", list([
        ["ran", seconds(harness.seconds) + (harness.timed_out ? ", stopped at its time limit" : "")],
        ["exit code", harness.exit_code === null ? "none (killed or never started)" : String(harness.exit_code)],
        ["error", harness.error],
        ["workspace", head.workspace],
      ]), harness.log_tail ? h("details", {}, h("summary", {}, "end of its log"), h("pre", { class: "log" }, visible(harness.log_tail))) : null),
      this.branchPanel(panel));
  }

  groupStrip() {
    const rewards = Object.entries(this.head.group_rewards);
    if (rewards.length < 2) return null;
    return h("div", { class: "group", title: "rewards of the group" }, h("span", { class: "soft" }, "group"),
      rewards.map(([id, reward]) => h("span", { class: "bar" + (id === this.head.spec.rollout ? " me" : ""),
        title: `${id}: ${rewardText(reward)}` }, h("i", { vars: { "--share": `${Math.round((reward ?? 0) * 100)}%` } }), rewardText(reward))));
  }

  branchPanel(panel) {
    const { branches } = this.head;
    if (!branches.length) return panel("Trained branches", h("p", { class: "soft" }, "None was selected: this rollout was not trained."));
    const pick = (value) => () => this.showBranch(this.branch === value ? null : value);
    this.branchButtons = branches.map((one) => h("button", { type: "button", class: "branch", "aria-pressed": "false", on: { click: pick(one.branch) } },
      h("b", {}, "b" + one.branch), h("span", { class: "dot r" + one.role }), this.head.roles[one.role],
      h("span", { class: "num", title: `${count(one.targets)} of its ${count(one.tokens)} tokens are trained` }, `${short(one.targets)} / ${short(one.tokens)}`)));
    return panel("Trained branches", h("div", { class: "branches" }, this.branchButtons),
      h("p", { class: "soft" }, `trained / all tokens; each is trained at most once, loss weights sum to ${this.head.totals.weight.toFixed(3)}`));
  }

  showBranch(branch) {
    this.branch = branch;
    this.branchButtons?.forEach((button, index) => button.setAttribute("aria-pressed", String(index === branch)));
    this.onPath = branch === null ? null : this.path(this.head.branches[branch].leaf);
    for (const item of this.items) {
      item.element.classList.toggle("off", Boolean(this.onPath) && item.node >= 0 && !this.onPath.has(item.node));
      if (item.node >= 0 && item.filled) this.refill(item);
    }
    if (branch !== null) {
      const first = this.items.findIndex((item) => item.node >= 0 && this.onPath.has(item.node) && this.nodes.trained[item.node].some((run) => run[2] === branch));
      if (first >= 0) this.focus(first);
    }
  }

  // ------------------------------------------------------------------------------------------------ timeline

  timeline() {
    const { calls } = this;
    if (!calls.length) return h("span", {});
    const { harness } = this.head;
    const end = Math.max(harness.started_s + harness.seconds, ...calls.map((call) => call.start + call.seconds)) || 1;
    const begin = Math.min(0, harness.started_s), span = end - begin || 1;
    const at = (value) => (100 * (value - begin)) / span;
    const lanes = [];
    this.bars = calls.map((call, index) => {
      let lane = lanes.findIndex((until) => until <= call.start + 1e-9);
      if (lane < 0) lane = lanes.push(0) - 1;
      lanes[lane] = Math.max(call.start + call.seconds, call.start + span / 600);
      const bar = h("rect", { x: at(call.start) + "%", y: 18 + Math.min(lane, 11) * 11, height: 9, rx: 1.5,
        width: Math.max((100 * call.seconds) / span, 0.12) + "%", class: "bar-call f" + call.role, "data-call": index },
        h("title", {}, `#${index} ${this.head.roles[call.role]} · at ${seconds(call.start)} for ${seconds(call.seconds)} · ${count(call.output)} tokens`));
      return bar;
    });
    const height = 18 + Math.min(lanes.length, 12) * 11 + 18;
    const ticks = [0, 0.25, 0.5, 0.75, 1].map((share) => h("text", { x: share * 100 + "%", y: height - 4, class: "tick",
      "text-anchor": share === 0 ? "start" : share === 1 ? "end" : "middle" }, seconds(begin + share * span)));
    const strip = h("svg", { class: "strip", height, width: "100%", role: "img", "aria-label": `${calls.length} calls over ${seconds(span)}`,
      on: { click: (event) => event.target.dataset?.call !== undefined && this.goCall(Number(event.target.dataset.call)) } },
      h("rect", { x: at(harness.started_s) + "%", width: Math.max((100 * harness.seconds) / span, 0.1) + "%", y: 6, height: 5, rx: 2.5, class: "harness" },
        h("title", {}, `harness: ${seconds(harness.seconds)}`)),
      this.bars, ticks);
    const clock = new Date(this.head.zero_s * 1000).toISOString().replace("T", " ").slice(0, 19);
    return h("section", { class: "time" }, h("h2", {}, "Time", h("span", { class: "soft" }, ` first call ${clock} UTC · grey: the harness · a click goes to the call`)), strip);
  }

  // ------------------------------------------------------------------------------------------------ toolbar

  toolbar() {
    const { totals, roles } = this.head;
    this.search = h("input", { type: "search", placeholder: "Search texts and call ids   /", "aria-label": "search", spellcheck: "false" });
    this.search.addEventListener("input", () => { clearTimeout(this.timer); this.timer = setTimeout(() => this.find(), 120); });
    this.search.addEventListener("keydown", (event) => {
      if (event.key === "Enter") { event.preventDefault(); this.find(); this.goFound(event.shiftKey ? -1 : 1); }
      if (event.key === "Escape") { this.search.value = ""; this.find(); this.focus(this.current ?? 0); }
    });
    this.hits = h("output", { class: "hits" });
    const toggle = (kind, value, title, ...content) => h("button", { type: "button", class: "filter", title, "aria-pressed": "false",
      on: { click: (event) => this.filter(kind, value, event.currentTarget) } }, ...content);
    const legend = roles.map((role, index) => totals.roles[role] ? toggle("role", index, `only ${role}`,
      h("span", { class: "mark-role r" + index }, SHAPE[role]), role, h("span", { class: "soft" }, count(totals.roles[role]))) : null);
    const marks = [...Object.entries(totals.substitutions).filter(([name]) => name !== "clean").map(([name, number]) => ["substitution", name, number, CLASSES[name]]),
      ...Object.entries(totals.finish_reasons).filter(([name]) => name !== "stop").map(([name, number]) => ["finish", name, number, ENDS[name]])]
      .map(([kind, name, number, title]) => toggle(kind, name, title, `${MARK[name] ?? ""} ${name}`, h("span", { class: "soft" }, count(number))));
    const trained = totals.trained_tokens ? toggle("trained", true, "only rows with trained tokens", h("span", { class: "mark-trained" }, "trained"), h("span", { class: "soft" }, "tokens")) : null;
    return h("nav", { class: "bar-tools", "aria-label": "outline" },
      h("div", { class: "find" }, this.search, this.hits),
      h("div", { class: "legend" }, legend, trained, marks,
        h("span", { class: "key" }, h("i", { class: "swatch prompt" }), "prompt"), h("span", { class: "key" }, h("i", { class: "swatch sampled" }), "sampled")),
      h("div", { class: "actions" },
        h("button", { type: "button", class: "quiet", on: { click: () => this.fold(true) } }, "Fold all"),
        h("button", { type: "button", class: "quiet", on: { click: () => this.fold(false) } }, "Unfold"),
        h("button", { type: "button", class: "quiet", on: { click: () => this.openAll(true) } }, "Open texts"),
        h("button", { type: "button", class: "quiet", on: { click: () => this.openAll(false) } }, "Close texts")));
  }

  filter(kind, value, button) {
    const values = this.filters.get(kind) ?? new Set();
    if (!values.delete(value)) values.add(value);
    this.filters.set(kind, values);
    button.setAttribute("aria-pressed", String(values.has(value)));
    this.update();
  }

  passes(node) {
    const call = this.calls[this.cause[node]];
    const value = { role: this.nodes.role[node], trained: this.trainedCount[node] > 0,
      substitution: call?.substitution, finish: this.nodes.sampled[node] ? call?.finish : undefined };
    // Marks of either kind show together ("forked" and "length"): they are alternatives, roles and training narrow down.
    const marks = [...(this.filters.get("substitution") ?? []), ...(this.filters.get("finish") ?? [])];
    if (marks.length && !marks.includes(value.substitution) && !marks.includes(value.finish)) return false;
    return ["role", "trained"].every((kind) => !this.filters.get(kind)?.size || this.filters.get(kind).has(value[kind]));
  }

  // ------------------------------------------------------------------------------------------------ outline

  tree() {
    const { rows, thread_of, threads } = this.layout;
    this.items = [];
    this.itemOfNode = new Map();
    rows.forEach((node, row) => {
      const thread = thread_of[row];
      if (threads[thread].start === row) this.items.push({ node: -1, thread });
      this.itemOfNode.set(node, this.items.length);
      this.items.push({ node, thread });
    });
    this.watcher = new IntersectionObserver((entries) => {
      for (const entry of entries) if (entry.isIntersecting) this.fill(this.items[Number(entry.target.dataset.item)]);
    }, { rootMargin: "1000px" });
    this.items.forEach((item, index) => {
      const level = Math.min(threads[item.thread].level, 12);
      item.element = h("div", { class: item.node < 0 ? "row head" : "row node", role: "treeitem", tabindex: "-1", "data-item": index,
        "aria-level": 2 * level + (item.node < 0 ? 1 : 2), vars: { "--level": String(level) } });
      if (item.node >= 0) {
        item.element.id = "node-" + item.node;
        item.element.classList.add("r" + this.nodes.role[item.node], this.nodes.sampled[item.node] ? "sampled" : "prompt");
      }
      this.watcher.observe(item.element);
    });
    const tree = h("div", { class: "tree", role: "tree", "aria-label": "token tree" }, this.items.map((item) => item.element));
    tree.addEventListener("click", (event) => {
      const line = event.target.closest(".line");
      if (!line || event.target.closest("a,button")) return;
      const index = Number(line.parentElement.dataset.item);
      this.focus(index, false);
      this.toggle(index);
    });
    if (!this.items.length) tree.append(h("p", { class: "empty" }, "No call was recorded: the tree is empty."));
    else this.items[0].element.tabIndex = 0;
    this.shown = h("p", { class: "shown soft" });
    return h("main", {}, tree, this.shown);
  }

  update() {
    const { threads } = this.layout;
    const filtering = [...this.filters.values()].some((values) => values.size);
    const inFolded = [];
    threads.forEach((thread, index) => { inFolded[index] = thread.parent >= 0 && (inFolded[thread.parent] || this.folded.has(thread.parent)); });
    let hidden = 0;
    const shownThreads = new Set();
    for (const item of this.items) if (item.node >= 0) {
      item.passes = !filtering || this.passes(item.node);
      for (let thread = item.thread; item.passes && filtering && thread >= 0 && !shownThreads.has(thread); thread = threads[thread].parent) shownThreads.add(thread);
      if (!item.passes) hidden++;
    }
    for (const item of this.items) {
      const hide = inFolded[item.thread] || (item.node < 0 ? filtering && !shownThreads.has(item.thread) : this.folded.has(item.thread) || !item.passes);
      if (item.element.hidden !== hide) item.element.hidden = hide;
      item.element.setAttribute("aria-expanded", String(item.node < 0 ? !this.folded.has(item.thread) : this.open.has(item.node)));
    }
    this.shown.textContent = hidden ? `${count(hidden)} rows do not fit the filters` : `${count(this.nodes.size.length)} nodes in ${count(threads.length)} threads`;
  }

  fill(item) {
    if (item.filled) return;
    item.filled = true;
    this.refill(item);
    this.watcher.unobserve(item.element);
  }

  refill(item) {
    item.element.replaceChildren(...(item.node < 0 ? [this.threadLine(item.thread)] : this.nodeRow(item.node)));
  }

  threadLine(index) {
    const { threads, rows } = this.layout;
    const thread = threads[index];
    const inside = rows.slice(thread.start, thread.end);
    const calls = [...new Set(inside.map((node) => this.nodes.call[node]).filter((call) => call >= 0))];
    const tokens = inside.reduce((sum, node) => sum + this.nodes.size[node], 0);
    const trained = inside.reduce((sum, node) => sum + this.trainedCount[node], 0);
    const roles = [...new Set(calls.map((call) => this.calls[call].role))].sort();
    const from = Math.min(...calls.map((call) => this.calls[call].start)), to = Math.max(...calls.map((call) => this.calls[call].start + this.calls[call].seconds));
    const nested = threads.filter((other) => other.parent === index).length;
    const cause = thread.below >= 0 ? this.cause[thread.below] : -1;
    const title = !thread.conversation ? "Branch" + (cause >= 0 ? ` after #${cause}` : "") : this.shared(thread) ? "Shared start" : "Conversation";
    return h("div", { class: "line" }, h("span", { class: "caret" }, this.folded.has(index) ? "▸" : "▾"),
      h("span", { class: "name" }, title), roles.map((role) => h("span", { class: "mark-role r" + role, title: this.head.roles[role] }, SHAPE[this.head.roles[role]])),
      h("span", { class: "soft" }, `${count(calls.length)} call${calls.length === 1 ? "" : "s"} · ${short(tokens)} tokens`),
      nested ? h("span", { class: "soft" }, `· ${count(nested)} inside`) : null,
      h("span", { class: "space" }),
      trained ? h("span", { class: "tag mark-trained" }, `${short(trained)} trained`) : null,
      calls.length ? h("span", { class: "soft num" }, `${seconds(from)} – ${seconds(to)}`) : null);
  }

  // A thread that is only a prompt with which several conversations begin.
  shared(thread) {
    const last = this.layout.rows.slice(thread.start, thread.end).findLast((node, row) => this.layout.thread_of[thread.start + row] === this.layout.threads.indexOf(thread));
    return !this.nodes.sampled[last] && this.kids[last].length > 1;
  }

  nodeRow(node) {
    const open = this.open.has(node);
    const line = this.nodeLine(node, open);
    return open ? [line, this.body(node)] : [line];
  }

  nodeLine(node, open) {
    const { nodes } = this;
    const sampled = nodes.sampled[node];
    const call = this.calls[nodes.call[node]];
    const cause = this.calls[this.cause[node]];
    const tags = [];
    if (sampled && call) {
      if (call.finish !== "stop") tags.push(h("span", { class: "tag warn", title: ENDS[call.finish] }, `${MARK[call.finish] ?? ""} ${call.finish}`));
    } else if (cause && cause.substitution !== "clean" && nodes.parent[cause.node] >= 0 && this.promptOf(cause) === node) {
      tags.push(h("span", { class: "tag " + cause.substitution, title: CLASSES[cause.substitution] }, `${MARK[cause.substitution]} ${cause.substitution}`));
    }
    if (sampled && call && call.substitution !== "clean" && this.promptOf(call) < 0) tags.push(h("span", { class: "tag " + call.substitution, title: CLASSES[call.substitution] }, `${MARK[call.substitution]} ${call.substitution}`));
    if (this.kids[node].length > 1) tags.push(h("span", { class: "tag", title: "later calls go on from here in several ways" }, `${this.kids[node].length} ways on`));
    const trained = this.trainedCount[node];
    if (trained) {
      const branches = [...new Set(nodes.trained[node].map((run) => "b" + run[2]))].join(" ");
      const other = this.branch !== null && !nodes.trained[node].some((run) => run[2] === this.branch);
      tags.push(h("span", { class: "tag mark-trained" + (other ? " other" : ""), title: `trained by ${branches}` },
        `${trained === nodes.size[node] ? "trained" : `${count(trained)} trained`} · ${branches}`));
    }
    const versions = [...new Set(nodes.spans[node].map((span) => "v" + span[0]))].join(" ");
    const index = nodes.call[node];
    const who = sampled
      ? [h("a", { class: "call", href: "#call=" + encodeURIComponent(call?.id ?? ""), title: call ? visible(call.id) : "" }, index >= 0 ? "#" + index : "?"),
        h("span", { class: "mark-role r" + nodes.role[node] }, SHAPE[this.head.roles[nodes.role[node]]]), h("span", { class: "role" }, this.head.roles[nodes.role[node]])]
      : [h("a", { class: "call soft", href: "#node=" + node, title: "node " + node }, "·"), h("span", { class: "role soft" }, "prompt")];
    return h("div", { class: "line" }, h("span", { class: "caret" }, open ? "▾" : "▸"), h("span", { class: "who" }, who),
      h("span", { class: "preview" }, open ? "" : this.preview(node)), h("span", { class: "tags" }, tags),
      h("span", { class: "num tokens" }, count(nodes.size[node]) + " tok"), h("span", { class: "num version" }, versions),
      h("span", { class: "num when" }, sampled && call && call.node === node ? `${seconds(call.start)} +${seconds(call.seconds)}` : ""));
  }

  // The prompt node whose end a call was sampled from, -1 when the call hangs at an output or a root.
  promptOf(call) {
    let node = call.node;
    while (node >= 0 && this.nodes.call[node] >= 0 && this.calls[this.nodes.call[node]] === call) node = this.nodes.parent[node];
    return node >= 0 && !this.nodes.sampled[node] && this.calls[this.cause[node]] === call ? node : -1;
  }

  preview(node) {
    const size = this.nodes.size[node], start = this.first[node];
    const clean = (from, to) => {
      const pieces = [];
      for (let i = start + from; i < start + to; i++) if (!this.special.has(this.tokens[i])) pieces.push(...this.pieces[this.tokens[i]]);
      return visible(new TextDecoder().decode(new Uint8Array(pieces)).replace(/\s+/g, " ").trim());
    };
    return (size <= 90 ? clean(0, size) : clean(0, 60) + " … " + clean(size - 30, size)) || visible(this.text(node, 0, Math.min(size, 90)));
  }

  body(node) {
    const { nodes } = this;
    const sampled = nodes.sampled[node];
    const call = this.calls[sampled ? nodes.call[node] : -1];
    const facts = [];
    if (call) {
      facts.push(["call", call.id], ["dialect", call.dialect], ["model", call.model],
        ["prompt", `${count(call.prompt)} tok, ${count(call.cached)} cached`], ["output", `${count(call.output)} tok`],
        ["prompt is", call.substitution], ["ended by", call.finish], ["started", seconds(call.start)], ["took", seconds(call.seconds)]);
      for (const [name, value] of Object.entries(call.hints)) facts.push([name, value]);
    }
    facts.push(["node", String(node)]);
    if (sampled) {
      let sum = 0, low = 0;
      for (let i = 0; i < nodes.size[node]; i++) { const value = this.logprobs[this.firstLogprob[node] + i]; sum += value; low = Math.max(low, value); }
      const unit = this.head.logprob_unit;
      facts.push(["log-prob", `mean −${((sum * unit) / nodes.size[node]).toFixed(3)}, lowest −${(low * unit).toFixed(3)}`]);
      if (nodes.spans[node].length > 1) facts.push(["versions", nodes.spans[node].map(([version, from, to]) => `v${version}: ${from}–${to}`).join(", ")]);
    }
    const perToken = this.tokenView.has(node);
    const end = this.whole.has(node) ? nodes.size[node] : Math.min(nodes.size[node], CHUNK);
    const again = () => { const item = this.items[this.itemOfNode.get(node)]; this.refill(item); this.highlight(); };
    const text = perToken ? this.tokenText(node, end) : this.plainText(node, end);
    const buttons = [
      h("button", { type: "button", class: "quiet", "aria-pressed": String(perToken), on: { click: () => { perToken ? this.tokenView.delete(node) : this.tokenView.add(node); again(); } } }, "Tokens"),
      h("button", { type: "button", class: "quiet", on: { click: (event) => { navigator.clipboard?.writeText(this.text(node)); event.currentTarget.textContent = "Copied"; } } }, "Copy"),
    ];
    if (perToken && sampled) buttons.push(h("span", { class: "scale" }, "log-prob 0", h("i", {}), "−6 and less"));
    if (end < nodes.size[node]) buttons.push(h("button", { type: "button", class: "quiet", on: { click: () => { this.whole.add(node); again(); } } }, `Show all ${count(nodes.size[node])} tokens`));
    return h("div", { class: "body" }, text, h("div", { class: "under" }, buttons,
      h("div", { class: "facts" }, facts.map(([name, value]) => h("span", {}, h("em", {}, visible(name)), visible(value))))));
  }

  // Runs of equal marks as one element each. A character whose bytes lie in two runs is shown in the second.
  plainText(node, end) {
    const box = h("pre", { class: "text", dir: "auto" });
    const decoder = new TextDecoder();
    const owner = this.owners(node);
    const start = this.first[node];
    const kind = (i) => (owner[i] + 1) * 2 + (this.special.has(this.tokens[start + i]) ? 1 : 0);
    for (let from = 0; from < end; ) {
      let to = from + 1;
      while (to < end && kind(to) === kind(from)) to++;
      const text = visible(decoder.decode(this.bytes(node, from, to), { stream: to < end }));
      box.append(h("span", { class: this.marks(owner[from], kind(from) % 2) }, text));
      from = to;
    }
    return box;
  }

  tokenText(node, end) {
    const box = h("pre", { class: "text tokens", dir: "auto" });
    const owner = this.owners(node);
    const start = this.first[node], sampled = this.nodes.sampled[node], unit = this.head.logprob_unit;
    const spans = this.nodes.spans[node];
    const decoder = new TextDecoder();
    for (let i = 0; i < end; i++) {
      const piece = this.tokens[start + i];
      let text = visible(decoder.decode(this.pieces[piece], { stream: i + 1 < end }));
      if (!text) text = [...this.pieces[piece]].map((byte) => "\\x" + byte.toString(16).padStart(2, "0")).join("");
      const facts = ["id " + this.pieceIds[piece]];
      const token = h("span", { class: "token " + this.marks(owner[i], this.special.has(piece)) }, text);
      if (sampled) {
        const value = this.logprobs[this.firstLogprob[node] + i] * unit;
        const version = spans.find((span) => span[1] <= i && i < span[2]);
        facts.push("log-prob −" + value.toFixed(3), "p " + Math.exp(-value).toFixed(3), version ? "v" + version[0] : "", owner[i] >= 0 ? "trained by b" + owner[i] : "not trained");
        token.style.setProperty("--heat", Math.round(Math.min(1, value / 6) * 80) + "%");
      }
      token.title = facts.filter(Boolean).join(" · ");
      box.append(token);
    }
    return box;
  }

  // Of each token the branch that trains it, -1 for none.
  owners(node) {
    const owner = new Int32Array(this.nodes.size[node]).fill(-1);
    for (const [from, to, branch] of this.nodes.trained[node]) owner.fill(branch, from, to);
    return owner;
  }

  marks(owner, special) {
    const trained = owner < 0 ? "" : this.branch === null || this.branch === owner ? "trained" : "trained-other";
    return (trained + (special ? " special" : "")).trim();
  }

  // ------------------------------------------------------------------------------------------------ moving about

  toggle(index, wanted) {
    const item = this.items[index];
    const set = item.node < 0 ? this.folded : this.open;
    const value = item.node < 0 ? item.thread : item.node;
    const have = set.has(value) !== (item.node < 0); // open now
    if (wanted !== undefined && wanted === have) return;
    if (!set.delete(value)) set.add(value);
    this.fill(item);
    this.refill(item);
    this.update();
    if (item.node >= 0) this.highlight();
  }

  fold(all) {
    this.folded = new Set(all ? this.layout.threads.keys() : []);
    for (const item of this.items) if (item.node < 0 && item.filled) this.refill(item);
    this.update();
  }

  openAll(open) {
    if (open) for (const item of this.items) if (item.node >= 0 && !item.element.hidden && this.open.size < 400) this.open.add(item.node);
    if (!open) this.open.clear();
    for (const item of this.items) if (item.node >= 0 && item.filled) this.refill(item);
    this.update();
    this.highlight();
  }

  focus(index, scroll = true) {
    const item = this.items[index];
    if (!item) return;
    if (this.current !== undefined) this.items[this.current].element.tabIndex = -1;
    this.current = index;
    this.fill(item);
    item.element.tabIndex = 0;
    item.element.focus({ preventScroll: true });
    if (scroll) item.element.scrollIntoView({ block: "nearest" });
    this.bars?.forEach((bar, call) => bar.classList.toggle("now", item.node >= 0 && call === this.cause[item.node]));
  }

  step(by) {
    let index = (this.current ?? -1) + by;
    while (index >= 0 && index < this.items.length && this.items[index].element.hidden) index += by;
    if (index >= 0 && index < this.items.length) this.focus(index);
  }

  reveal(node, open = true) {
    const index = this.itemOfNode.get(node);
    for (let thread = this.items[index].thread; thread >= 0; thread = this.layout.threads[thread].parent) {
      if (this.folded.delete(thread)) {
        const head = this.items.find((item) => item.node < 0 && item.thread === thread);
        if (head.filled) this.refill(head);
      }
    }
    if (this.filters.size && !this.passes(node)) {
      this.filters.clear();
      document.querySelectorAll(".filter").forEach((button) => button.setAttribute("aria-pressed", "false"));
    }
    if (open) this.open.add(node);
    const item = this.items[index];
    this.fill(item);
    this.refill(item);
    this.update();
    this.focus(index, false);
    item.element.scrollIntoView({ block: "center" });
    // Rows above may be filled only now and move it.
    requestAnimationFrame(() => requestAnimationFrame(() => item.element.scrollIntoView({ block: "nearest" })));
  }

  goCall(index) {
    const call = this.calls[index];
    if (!call || call.node < 0) return;
    history.replaceState(null, "", "#call=" + encodeURIComponent(call.id));
    this.reveal(call.node);
  }

  follow() {
    const [kind, value] = location.hash.slice(1).split("=");
    let wanted = "";
    try { wanted = decodeURIComponent(value ?? ""); } catch { return; }
    if (kind === "call" && this.callOfId.has(wanted)) this.goCall(this.callOfId.get(wanted));
    if (kind === "node" && this.itemOfNode.has(Number(wanted)) && wanted !== "") this.reveal(Number(wanted));
  }

  find() {
    const query = this.search.value.toLowerCase();
    if (query === this.query) return;
    this.query = query;
    this.found = [];
    this.at = -1;
    if (query) {
      for (const node of this.layout.rows) {
        this.lower[node] ??= this.text(node).toLowerCase();
        const call = this.calls[this.nodes.call[node]];
        if (this.lower[node].includes(query) || call?.id.toLowerCase().includes(query)) this.found.push(node);
      }
    }
    const found = new Set(this.found);
    for (const item of this.items) item.element.classList.toggle("match", item.node >= 0 && found.has(item.node));
    this.hits.textContent = query ? `${count(found.size)} row${found.size === 1 ? "" : "s"}` : "";
    this.highlight();
  }

  goFound(by) {
    if (!this.found.length) return;
    this.at = this.at < 0 && by < 0 ? this.found.length - 1 : (this.at + by + this.found.length) % this.found.length;
    const node = this.found[this.at];
    const place = this.lower[node].indexOf(this.query);
    if (place > CHUNK) this.whole.add(node);
    const typing = document.activeElement === this.search;
    this.reveal(node);
    this.highlight();
    this.hits.textContent = `${count(this.at + 1)} of ${count(this.found.length)}`;
    if (typing) this.search.focus({ preventScroll: true });
    const box = $(".text", this.items[this.itemOfNode.get(node)].element);
    const range = this.ranges?.find((one) => box?.contains(one.startContainer));
    if (range) box.scrollTop += range.getBoundingClientRect().top - box.getBoundingClientRect().top - 60;
  }

  // Marks the query in the opened texts, without touching their elements.
  highlight() {
    if (!window.CSS?.highlights) return;
    CSS.highlights.delete("found");
    this.ranges = [];
    if (!this.query) return;
    for (const box of document.querySelectorAll(".row.match .text")) {
      const walker = document.createTreeWalker(box, NodeFilter.SHOW_TEXT);
      const places = [];
      let all = "";
      while (walker.nextNode()) { places.push([all.length, walker.currentNode]); all += walker.currentNode.data; }
      const lower = all.toLowerCase();
      if (lower.length !== all.length) continue; // a letter whose lower case is longer: places would be wrong
      const locate = (offset) => { const [start, text] = places.findLast((place) => place[0] <= offset); return [text, offset - start]; };
      for (let at = lower.indexOf(this.query); at >= 0 && this.ranges.length < 2000; at = lower.indexOf(this.query, at + this.query.length)) {
        const range = new Range();
        range.setStart(...locate(at));
        const [text, offset] = locate(at + this.query.length - 1);
        range.setEnd(text, offset + 1);
        this.ranges.push(range);
      }
    }
    CSS.highlights.set("found", new Highlight(...this.ranges));
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target === this.search) return;
    const item = this.items[this.current ?? 0];
    const index = this.current ?? 0;
    const does = {
      "/": () => { this.search.focus(); this.search.select(); },
      j: () => this.step(1), ArrowDown: () => this.step(1), k: () => this.step(-1), ArrowUp: () => this.step(-1),
      Home: () => this.focus(0), End: () => { this.current = this.items.length; this.current && this.lastShown(); },
      ArrowRight: () => this.toggle(index, true), ArrowLeft: () => this.back(index),
      Enter: () => this.toggle(index), " ": () => this.toggle(index),
      n: () => this.goFound(1), N: () => this.goFound(-1),
      e: () => this.openAll(true), c: () => this.openAll(false), f: () => this.fold(!this.folded.size),
      t: () => { if (item?.node >= 0) { if (!this.tokenView.delete(item.node)) this.tokenView.add(item.node); this.open.add(item.node); this.refill(item); this.update(); this.highlight(); } },
      b: () => { const total = this.head.branches.length; if (total) this.showBranch(this.branch === null ? 0 : this.branch + 1 < total ? this.branch + 1 : null); },
      "?": () => this.help(),
    }[event.key];
    if (!does || !this.items.length) return;
    if (event.target.closest?.("button,a,summary") && ["Enter", " "].includes(event.key)) return;
    event.preventDefault();
    does();
  }

  lastShown() {
    let index = this.items.length - 1;
    while (index > 0 && this.items[index].element.hidden) index--;
    this.current = undefined;
    this.focus(index);
  }

  // Closes what is open, else goes to the head of the thread.
  back(index) {
    const item = this.items[index];
    if (item.node >= 0 && this.open.has(item.node)) return this.toggle(index, false);
    if (item.node < 0 && !this.folded.has(item.thread)) return this.toggle(index, false);
    const thread = item.node < 0 ? this.layout.threads[item.thread].parent : item.thread;
    const head = this.items.findIndex((one) => one.node < 0 && one.thread === thread);
    if (head >= 0) this.focus(head);
  }

  help() {
    const keys = [["↓ j   ↑ k", "next, previous row"], ["→  ←", "open, close"], ["Enter", "open or close"], ["/", "search"], ["n  N", "next, previous match"],
      ["t", "tokens with log-probs"], ["b", "next trained branch"], ["e  c", "open, close texts"], ["f", "fold or unfold threads"], ["#call=ID", "at the end of the address: link to a call"]];
    const dialog = h("dialog", { class: "help" }, h("h2", {}, "Keyboard"),
      h("dl", {}, keys.map(([key, what]) => [h("dt", {}, key), h("dd", {}, what)])),
      h("button", { class: "quiet", type: "button", on: { click: () => dialog.close() } }, "Close"));
    dialog.addEventListener("close", () => dialog.remove());
    dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
    document.body.append(dialog);
    dialog.showModal();
  }
}

function percent(part, whole) {
  return whole ? Math.round((100 * part) / whole) + " %" : "0 %";
}

start((app, head, parts) => new RolloutPage(app, head, parts));
