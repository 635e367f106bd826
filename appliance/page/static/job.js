import { Curves } from "./curves.js";
import { listen } from "./live.js";
import { Log } from "./log.js";

const curves = new Curves();
const log = new Log();

listen({
  begin() {
    curves.clear();
    log.clear();
  },
  scalars: (points) => curves.add(points),
  log: (rows) => log.add(rows),
});
