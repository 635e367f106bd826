import { listen } from "./live.js";

listen({});
