"use strict";
// The button that asks a run to stop, and the dialog that asks for the token.

let token = ""; // as long as the page is open

function stopButton(run) {
  return build("button", { onclick: () => askToStop(run) }, "Stop…");
}

function askToStop(run) {
  const answer = build("p", { role: "status" });
  const field = build("input", {
    type: "password",
    autocomplete: "off",
    id: "token",
    onkeydown: (event) => event.key === "Enter" && send(),
  });
  const stop = build("button", { onclick: () => send() }, `Stop ${run.name}`);
  const close = build("button", { onclick: () => dialog.close() }, "Close");
  const dialog = build(
    "dialog",
    { onclose: () => dialog.remove() },
    build("h2", { style: { "margin-top": 0 } }, `Stop ${run.name}?`),
    build(
      "p",
      {},
      "It saves at its next logged step and ends with exit code 75. The command that started it continues it.",
    ),
    build("label", { for: "token" }, "Token"),
    field,
    build("div", { class: "row" }, stop, close),
    answer,
  );
  async function send() {
    token = field.value;
    stop.disabled = true;
    try {
      const response = await fetch(`stop?run=${run.id}`, {
        method: "POST",
        headers: { Authorization: `Bearer ${token}` },
      });
      answer.textContent = await response.text();
      if (!response.ok) stop.disabled = false;
    } catch {
      answer.textContent = "The server does not answer.";
      stop.disabled = false;
    }
  }
  field.value = token;
  document.body.append(dialog);
  dialog.showModal();
}
