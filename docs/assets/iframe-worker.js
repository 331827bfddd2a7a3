// Browsers start no worker from a file. Opened from disk, the site's search runs in a hidden frame instead, which
// Material knows by this name.
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      const inside = frame.contentWindow
      const run = source => new Promise((done, failed) => {
        const script = inside.document.createElement("script")
        Object.assign(script, { src: source, onload: done, onerror: failed })
        inside.document.body.append(script)
      })
      inside.importScripts = (...sources) => sources.reduce((before, one) => before.then(() => run(one)), Promise.resolve())
      inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      const ready = run(new URL(url, location.href).href)
      this.postMessage = data => ready.then(() => inside.dispatchEvent(new inside.MessageEvent("message", { data })))
      this.terminate = () => frame.remove()
    }
  }
  window.Worker = window.IFrameWorker
}
