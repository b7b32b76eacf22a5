// The search of the site computes in a worker, which browsers refuse to pages that are opened as
// files. There this takes its place: the same script in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.appendChild(frame);
      this.inside = frame.contentWindow;
      addEventListener("message", ({ source, data }) => {
        if (source === this.inside) this.dispatchEvent(new MessageEvent("message", { data }));
      });
      const begin = (inside) => {
        inside.postMessage = (data) => inside.parent.postMessage(data, "*");
        inside.importScripts = (...urls) =>
          urls.reduce(
            (before, url) =>
              before.then(
                () =>
                  new Promise((done) => {
                    const script = inside.document.createElement("script");
                    script.src = url;
                    script.onload = done;
                    inside.document.body.appendChild(script);
                  })
              ),
            Promise.resolve()
          );
      };
      const { document: its } = this.inside;
      its.open();
      its.write(`<body><script>(${begin})(window)</script><script src="${url}"></script></body>`);
      its.close();
      this.loaded = new Promise((done) => (this.inside.onload = done));
    }

    postMessage(data) {
      this.loaded.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })));
    }

    terminate() {
      this.inside.frameElement.remove();
    }
  };
}
