"use strict";
// Everything works without this script, except keys and guesses. Parts of a page are replaced when it is fetched again.
let busy = false;

function replaceParts(text) {
  const page = new DOMParser().parseFromString(text, "text/html");
  const parts = [...document.querySelectorAll("[data-part]")];
  if (!parts.length || parts.some((part) => !page.getElementById(part.id))) return location.reload();
  for (const part of parts) {
    const fresh = page.getElementById(part.id);
    if (part.dataset.seen === fresh.innerHTML) continue;
    const focused = part.contains(document.activeElement) ? document.activeElement.id : "";
    part.dataset.seen = fresh.innerHTML;
    part.replaceChildren(...fresh.childNodes);
    if (focused) document.getElementById(focused)?.focus();
  }
  showGuess();
}

async function showGuess() {
  const place = document.querySelector("#guess[data-guess]");
  if (!place) return;
  const address = place.dataset.guess;
  delete place.dataset.guess;
  place.textContent = "The model looks at it ...";
  const guess = await (await fetch(address)).json();
  if (!place.isConnected) return;
  if (guess.reason) {
    place.textContent = `No guess: ${guess.reason}`;
    return;
  }
  const button = [...document.querySelectorAll("[data-label]")].find((one) => one.dataset.label === guess.label);
  place.textContent = `The model says ${guess.label} (${Math.round(100 * (guess.probability ?? 0))} %)${button ? ", Enter agrees." : "."}`;
  button?.classList.add("guess");
}

async function send(form, button) {
  if (busy) return;
  busy = true;
  try {
    const fields = new URLSearchParams(new FormData(form));
    if (button?.name) fields.set(button.name, button.value);
    const answer = await fetch(form.action, { method: "POST", body: fields });
    replaceParts(await answer.text());
    if (answer.redirected) history.replaceState(null, "", answer.url);
  } catch {
    location.reload();
  } finally {
    busy = false;
  }
}

document.addEventListener("submit", (event) => {
  if (!event.target.querySelector("[data-key]")) return;
  event.preventDefault();
  send(event.target, event.submitter);
});

document.addEventListener("keydown", (event) => {
  const keys = document.querySelector("#keys");
  if (!keys?.checked || event.ctrlKey || event.altKey || event.metaKey || event.repeat || busy) return;
  if ([" ", "Enter"].includes(event.key) && event.target.closest("a, button, input")) return;
  const button = event.key === "Enter"
    ? document.querySelector("button.guess")
    : [...document.querySelectorAll("[data-key]")].find((one) => one.dataset.key === event.key);
  if (!button || button.disabled) return;
  event.preventDefault();
  send(button.form, button);
});

const every = Number(document.querySelector("main[data-every]")?.dataset.every);
if (every) {
  setInterval(async () => {
    if (document.hidden || busy) return;
    try {
      replaceParts(await (await fetch(location.href)).text());
    } catch {
      // the page is not served now: what was shown last stays
    }
  }, 1000 * every);
}
showGuess();
