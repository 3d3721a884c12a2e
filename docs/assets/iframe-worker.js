// Browsers start no worker of a page that is opened as a file. The site's search needs one: here it is a hidden frame.
if (location.protocol === "file:")
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      const inside = frame.contentWindow
      const base = new URL(url, location.href)
      const load = source => new Promise((resolve, reject) => {
        const script = inside.document.createElement("script")
        Object.assign(script, { src: new URL(source, base), onload: resolve, onerror: reject })
        inside.document.head.append(script)
      })
      inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      inside.importScripts = (...sources) => Promise.all(sources.map(load))
      this.inside = inside
      this.ready = load(base)
    }

    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })))
    }

    terminate() {
      this.inside.frameElement.remove()
    }
  }
