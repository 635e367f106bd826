import { Comparison } from "./comparison.js";
import { Curves } from "./curves.js";
import { listen } from "./live.js";
import { Log } from "./log.js";

const job = document.body.dataset.job;
const curves = new Curves();
const log = new Log();

listen({
  begin() {
    curves.clear(job);
    log.clear();
  },
  scalars: (points) => curves.add(job, points),
  log: (rows) => log.add(rows),
});
new Comparison(curves);
