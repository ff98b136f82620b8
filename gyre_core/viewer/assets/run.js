// A whole run: steps, held-out evaluations, and every rollout in its group.

class RunPage {
  constructor(app, head) {
    this.head = head;
    this.sort = { name: null, down: true };
    this.query = "";
    this.body = h("tbody");
    app.append(this.header(), ...this.tables(), this.rollouts());
    this.show();
  }

  header() {
    const rollouts = this.head.groups.reduce((sum, group) => sum + group.rollouts.length, 0);
    return h("header", {}, h("div", { class: "brand" }, "gyre", h("span", { class: "soft" }, " run")), h("h1", {}, visible(this.head.run)),
      h("div", { class: "chips" }, h("span", { class: "chip" }, `${count(this.head.steps.length)} steps`), h("span", { class: "chip" }, `${count(this.head.groups.length)} groups`),
        h("span", { class: "chip" }, `${count(rollouts)} rollouts`),
        this.head.evaluations.map((one) => h("span", { class: "chip" }, `held-out ${visible(one.tag)}: ${rewardText(one.reward)} at v${one.policy_version}`))),
      h("div", { class: "tools" }, themeButton()));
  }

  tables() {
    if (!this.head.steps.length) return [];
    const names = ["step", "reward", "groups trained", "groups dropped", "tokens sampled", "tokens trained", "grad norm", "outcomes"];
    return [h("section", { class: "sheet" }, h("h2", {}, "Steps"), h("table", {}, h("thead", {}, h("tr", {}, names.map((name) => h("th", { scope: "col" }, name)))),
      h("tbody", {}, this.head.steps.map((step) => h("tr", {}, [step.step, step.reward.toFixed(3), step.groups_trained, step.groups_dropped, count(step.tokens_sampled),
        count(step.tokens_trained), step.grad_norm.toFixed(3), Object.entries(step.outcomes).map(([name, number]) => `${name} ${number}`).join(", ")]
        .map((value) => h("td", {}, visible(value))))))))];
  }

  rollouts() {
    const search = h("input", { type: "search", placeholder: "Search rollouts   /", "aria-label": "search" });
    search.addEventListener("input", () => { this.query = search.value.toLowerCase(); this.show(); });
    document.addEventListener("keydown", (event) => { if (event.key === "/" && event.target !== search) { event.preventDefault(); search.focus(); } });
    this.columns = [["rollout", "id"], ["outcome", "outcome"], ["reward", "reward"], ["calls", "calls"], ["tokens", "tokens"], ["sampled", "sampled"], ["trained branches", "branches"], ["seconds", "seconds"], ["reason", "reason"]];
    const heads = this.columns.map(([title, name]) => h("th", { scope: "col", class: ["reason", "outcome"].includes(name) ? "left" : null }, h("button", { type: "button", on: { click: () => {
      this.sort = { name: this.sort.name === name && !this.sort.down ? null : name, down: this.sort.name !== name };
      this.show();
    } } }, title)));
    this.heads = heads;
    this.note = h("p", { class: "soft" });
    return h("section", { class: "sheet" }, h("div", { class: "find" }, h("h2", {}, "Rollouts"), search), h("table", {}, h("thead", {}, h("tr", {}, heads)), this.body), this.note);
  }

  show() {
    const fits = (text) => !this.query || text.toLowerCase().includes(this.query);
    const { name, down } = this.sort;
    const rows = [];
    const all = [];
    for (const group of this.head.groups) {
      const found = group.rollouts.filter((one) => fits([one.id, one.outcome, one.reason, group.id, group.problem, group.kind].join(" ")));
      all.push(...found);
      if (name || !found.length) continue;
      const where = group.kind === "training" ? `step ${group.step + 1}` : "held-out";
      rows.push(h("tr", { class: "group-row" }, h("td", { colspan: this.columns.length }, visible(group.id),
        h("span", { class: "soft" }, ` ${where} · problem ${visible(group.problem)} · v${group.version}${group.dropped_reason ? " · not trained: " + visible(group.dropped_reason) : ""}`))));
      rows.push(...found.map((one) => this.row(one, "of-group")));
    }
    if (name) {
      const key = (one) => one[name] ?? -Infinity;
      all.sort((a, b) => (key(a) < key(b) ? -1 : key(a) > key(b) ? 1 : 0) * (down ? -1 : 1));
      rows.push(...all.map((one) => this.row(one, "")));
    }
    this.heads.forEach((head, index) => head.setAttribute("aria-sort", this.columns[index][1] !== name ? "none" : down ? "descending" : "ascending"));
    this.body.replaceChildren(...rows);
    this.note.textContent = `${count(all.length)} rollouts. A page of one: gyre inspect ${this.head.run} ROLLOUT --html FILE`;
  }

  row(one, kind) {
    const id = one.page ? h("a", { href: one.page.split("/").map(encodeURIComponent).join("/") }, visible(one.id)) : visible(one.id);
    return h("tr", { class: kind }, h("td", {}, id), h("td", { class: "left" }, one.outcome), h("td", { class: rewardKind(one.reward)[0] }, `${rewardKind(one.reward)[1]} ${rewardText(one.reward)}`),
      [one.calls, one.tokens, one.sampled, one.branches].map((number) => h("td", {}, count(number))), h("td", {}, one.seconds.toFixed(1)), h("td", { class: "wide" }, visible(one.reason)));
  }
}

start((app, head) => new RunPage(app, head));
