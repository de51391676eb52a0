/** A value that tells who listens when it changes. */

import { useEffect, useState } from "./vendor/preact.mjs";

export class Signal {
  #value;
  #listeners = new Set();

  constructor(value) {
    this.#value = value;
  }

  get value() {
    return this.#value;
  }

  set value(value) {
    if (Object.is(value, this.#value)) return;
    this.#value = value;
    this.#listeners.forEach((listener) => listener(value));
  }

  /** @returns {() => void} ends it */
  listen(listener) {
    this.#listeners.add(listener);
    return () => this.#listeners.delete(listener);
  }
}

/** The signal's value; the component is drawn again when it changes. */
export function useSignal(signal) {
  const [value, setValue] = useState(signal.value);
  useEffect(() => {
    setValue(signal.value);
    return signal.listen(setValue);
  }, [signal]);
  return value;
}
