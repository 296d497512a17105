// The cluster as the gateway tells it: one snapshot, then numbered updates. A gap is repaired by another snapshot.

const RETRY_MS = 1000;
const SILENT_MS = 6000; // three of the gateway's own signs of life

export class Source {
  constructor(onChange) {
    this.onChange = onChange;
    this.tables = { members: {}, transfers: {}, leases: {}, out_of_use: {}, isolated: {}, ended: {} };
    this.head = null;
    this.bus = { state: "starting", since_ms: Date.now() };
    this.sequence = -1;
    this.repairs = 0;
    this.updates = 0;
    this.heardAt = 0; // by this browser's clock; 0: never
    this.asOf = 0; // by the gateway's
    this.ahead = 0; // how far the gateway's clock is ahead of this browser's
    this.lostAt = 0; // since when the gateway does not answer; 0: it does
    this.stream = null;
    this.repairing = false;
    this.listen();
    setInterval(() => this.watch(), 1000);
  }

  // Now, by the clock that the rows' times were made with.
  now() {
    return Date.now() + this.ahead;
  }

  listen() {
    const stream = new EventSource("/v1/cluster/events");
    this.stream = stream;
    stream.addEventListener("snapshot", (event) => this.take(JSON.parse(event.data)));
    stream.addEventListener("update", (event) => this.update(JSON.parse(event.data)));
    stream.onerror = () => {
      stream.close();
      if (this.stream !== stream) return;
      this.stream = null;
      this.lose();
      setTimeout(() => this.listen(), RETRY_MS);
    };
  }

  take(told) {
    this.tables = told.tables;
    this.heard(told);
  }

  update(told) {
    if (told.sequence <= this.sequence) return; // it stands in the snapshot already
    if (told.previous !== this.sequence) {
      this.repair();
      return;
    }
    for (const [table, rows] of Object.entries(told.set)) Object.assign(this.tables[table], rows);
    for (const [table, keys] of Object.entries(told.gone)) for (const key of keys) delete this.tables[table][key];
    this.updates += 1;
    this.heard(told);
  }

  heard(told) {
    this.sequence = told.sequence;
    this.head = told.head;
    this.bus = told.bus;
    this.heardAt = Date.now();
    this.asOf = told.now_ms;
    this.ahead = told.now_ms - this.heardAt;
    this.lostAt = 0;
    this.onChange();
  }

  async repair() {
    if (this.repairing) return;
    this.repairing = true;
    try {
      const answer = await fetch("/v1/cluster");
      if (answer.ok) {
        this.take(await answer.json());
        this.repairs += 1;
      }
    } catch {
      this.lose(); // the stream's own end starts it anew
    } finally {
      this.repairing = false;
    }
  }

  lose() {
    if (!this.lostAt) this.lostAt = this.heardAt || Date.now();
    this.onChange();
  }

  // A connection may hang without ending: then silence tells.
  watch() {
    if (!this.lostAt && this.heardAt && Date.now() - this.heardAt > SILENT_MS) {
      this.stream?.close();
      this.stream = null;
      this.lose();
      setTimeout(() => this.listen(), RETRY_MS);
    } else {
      this.onChange(); // ages grow
    }
  }
}
