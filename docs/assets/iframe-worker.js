// Search runs in a Worker, and browsers start none from a file. An iframe runs the same script in its place.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const own = new URL(url, document.baseURI), frame = document.createElement("iframe");
      frame.hidden = true;
      this.inside = new Promise((resolve) => {
        frame.addEventListener("load", () => {
          const inside = frame.contentWindow;
          const load = (address, done) => {
            const script = inside.document.createElement("script");
            script.src = new URL(address, own);
            script.addEventListener("load", done);
            inside.document.body.append(script);
          };
          inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
          inside.importScripts = (...addresses) => Promise.all(addresses.map((one) => new Promise((done) => load(one, done))));
          load(own, () => resolve(inside));
        });
      });
      frame.srcdoc = "<!doctype html><body></body>";
      document.body.append(frame);
    }
    postMessage(data) {
      this.inside.then((inside) => inside.dispatchEvent(new MessageEvent("message", { data })));
    }
    terminate() {}
  };
}
