/* Hosts the GPU memory panel in the right sidebar of JupyterLab 4 and Notebook 7.
 *
 * A hand-written module-federation container, so that a Python package needs no bundler: JupyterLab asks it
 * only for init(shareScope) and get(module). The panel itself is an ipywidget of the kernel; this file shows
 * the one of the current notebook and tells the kernel whether anybody sees it.
 *
 * The file's name carries a hash of its content: servers let browsers keep it for a year.
 */
(function () {
  'use strict';

  const NAME = 'jupyter_gpumem';
  const WIDGETS = '@jupyter-widgets/jupyterlab-manager';
  const WIDGET_VIEW = 'application/vnd.jupyter.widget-view+json';
  const LOAD = '%load_ext jupyter_gpumem';
  const GONE = ['restarting', 'autorestarting', 'dead', 'terminating'];
  const ICON =
    '<svg xmlns="http://www.w3.org/2000/svg" width="16" viewBox="0 0 24 24"><path class="jp-icon3" fill="#616161" ' +
    'd="M7 2h2v3h2V2h2v3h2V2h2v3a2 2 0 0 1 2 2h3v2h-3v2h3v2h-3v2h3v2h-3a2 2 0 0 1-2 2v3h-2v-3h-2v3h-2v-3H9v3H7v-3a2 2 0 0 ' +
    '1-2-2H2v-2h3v-2H2v-2h3V9H2V7h3a2 2 0 0 1 2-2V2zm0 5v10h10V7H7zm2 8V11h1.6v4H9zm2.2 0V9h1.6v6h-1.6zm2.2 0v-3H15v3h-1.6z"/></svg>';
  // one name for this window: several may look at the same kernel
  const CLIENT = Array.from(crypto.getRandomValues(new Uint32Array(2)), n => n.toString(36)).join('');

  let scope = null;

  async function shared(name) {
    const versions = scope[name];
    if (!versions) throw new Error(`${NAME}: ${name} is not shared by this application`);
    const keys = Object.keys(versions);
    return (await versions[keys.find(key => versions[key].loaded) || keys[0]].get())();
  }

  function element(tag, text, style) {
    const node = document.createElement(tag);
    node.textContent = text || '';
    Object.assign(node.style, style || {});
    return node;
  }

  function kernelOf(notebook) {
    const session = notebook && notebook.sessionContext.session;
    return (session && session.kernel) || null;
  }

  function define(notebookModule, applicationModule, lumino, ui) {
    /* What is shown where the current notebook has no panel. */
    class Hint extends lumino.Widget {
      constructor(load) {
        super();
        this.addClass('gm-hint');
        Object.assign(this.node.style, {
          padding: '12px', lineHeight: '1.5', color: 'var(--jp-ui-font-color1)', fontSize: 'var(--jp-ui-font-size1)'
        });
        this.words = element('p', '', { margin: '0 0 8px' });
        this.code = element('code', LOAD, {
          display: 'block', margin: '0 0 10px', fontFamily: 'var(--jp-code-font-family)', overflowWrap: 'anywhere'
        });
        this.button = element('button', 'Load it in this notebook');
        this.button.type = 'button';
        this.button.className = 'jp-mod-styled jp-mod-accept';
        this.button.addEventListener('click', load);
        this.answer = element('p', '', { margin: '10px 0 0', color: 'var(--jp-error-color1)', overflowWrap: 'anywhere' });
        this.answer.setAttribute('role', 'status');
        this.node.append(this.words, this.code, this.button, this.answer);
      }

      say(words, canLoad) {
        this.words.textContent = words;
        this.code.style.display = canLoad ? 'block' : 'none';
        this.button.style.display = canLoad ? '' : 'none';
      }
    }

    class Sidebar extends lumino.Panel {
      constructor(app, tracker, restored) {
        super();
        this.id = 'jupyter-gpumem-sidebar';
        this.title.caption = 'GPU memory';
        this.title.icon = new ui.LabIcon({ name: 'jupyter_gpumem:chip', svgstr: ICON });
        this.node.setAttribute('role', 'region');
        this.node.setAttribute('aria-label', 'GPU memory');
        Object.assign(this.node.style, { overflow: 'hidden auto', background: 'var(--jp-layout-color1)', minWidth: '230px' });
        this.app = app;
        this.tracker = tracker;
        // Notebook 7 restores no layout: the kernel whose panel is open lasts through a reload of the page
        this.storage = restored ? null : window.sessionStorage;
        this.reopen = this.storage && this.storage.getItem(NAME);
        this.entries = new Map(); // kernel id -> {notebook, kernel, comm, modelId, view, seen}
        this.revealed = new Set(); // kernels whose panel has opened by itself once
        this.languages = new Map(); // kernel id -> language name
        this.loading = new Map(); // kernel id -> whether a cell was running when the button was pressed
        this.answers = new Map(); // kernel id -> why loading failed
        this.hint = new Hint(() => void this.load());
        this.addWidget(this.hint);
        tracker.forEach(notebook => this.watch(notebook));
        tracker.widgetAdded.connect((_, notebook) => this.watch(notebook));
        tracker.currentChanged.connect(() => this.refresh());
        document.addEventListener('visibilitychange', () => this.refresh());
        this.keepFocus();
        window.addEventListener('pagehide', () => this.entries.forEach(entry => this.tell(entry, false)));
      }

      onAfterShow() { this.refresh(); }
      onAfterHide() { this.refresh(); }
      onAfterAttach() { this.refresh(); }

      watch(notebook) {
        const context = notebook.sessionContext;
        context.kernelChanged.connect((_, change) => {
          if (change.oldValue) this.drop(change.oldValue.id);
          if (change.newValue) this.hook(notebook, change.newValue);
          this.refresh();
        });
        context.statusChanged.connect((_, status) => {
          const kernel = kernelOf(notebook);
          if (kernel && GONE.includes(status)) this.drop(kernel.id);
        });
        notebook.disposed.connect(() => {
          for (const [id, entry] of this.entries) if (entry.notebook === notebook) this.drop(id);
        });
        if (kernelOf(notebook)) this.hook(notebook, kernelOf(notebook));
      }

      hook(notebook, kernel) {
        if (this.reopen === kernel.id) this.reveal();
        this.reopen = null;
        // of several connections to one kernel in this page the first alone gets comms
        if (!kernel.handleComms) return;
        kernel.disposed.connect(() => void this.inherit(kernel.id).catch(error => console.warn(NAME, error)));
        kernel.registerCommTarget(NAME, (comm, message) => this.attach(notebook, kernel, comm, message.content.data));
        this.find(notebook, kernel).catch(error => console.warn(NAME, error));
      }

      /* After a page reload, or in a second window, the kernel's comm is open already. */
      async find(notebook, kernel) {
        const info = await kernel.info;
        this.languages.set(kernel.id, info.language_info.name);
        this.refresh();
        const reply = await kernel.requestCommInfo({ target_name: NAME });
        for (const id of Object.keys((reply.content && reply.content.comms) || {})) {
          if (this.entries.has(kernel.id) || kernel.isDisposed || kernel.hasComm(id)) return;
          this.attach(notebook, kernel, kernel.createComm(NAME, id), {});
        }
      }

      /* The connection that gets the kernel's comms is closed: another notebook of this kernel takes over. */
      async inherit(kernelId) {
        const heir = this.tracker.find(notebook => {
          const kernel = kernelOf(notebook);
          return !!kernel && kernel.id === kernelId && !kernel.isDisposed;
        });
        if (!heir) return;
        const { registerWidgetManager } = await shared(WIDGETS);
        const kernel = kernelOf(heir);
        kernel.handleComms = true;
        registerWidgetManager(heir.context, heir.content.rendermime, []);
        this.hook(heir, kernel);
      }

      attach(notebook, kernel, comm, data) {
        this.drop(kernel.id);
        const entry = { notebook, kernel, comm, modelId: null, view: null, seen: false, fresh: !this.revealed.has(kernel.id) };
        comm.onMsg = message => {
          const told = message.content.data || {};
          if (told.model_id) this.render(entry, told.model_id);
          if (told.method === 'reveal') {
            // the kernel shows the panel below the cell when no window answers
            this.send(entry, { method: 'hello', client: CLIENT });
            this.reveal();
          }
          if (told.method === 'first') this.revealFirst(entry);
          if (told.method === 'who') this.repeat(entry);
        };
        comm.onClose = () => this.drop(kernel.id, comm);
        // who was asleep may have been forgotten
        kernel.connectionStatusChanged.connect((_, status) => {
          if (status === 'connected' && this.entries.get(kernel.id) === entry) this.repeat(entry);
        });
        this.entries.set(kernel.id, entry);
        this.answers.delete(kernel.id);
        this.send(entry, { method: 'hello', client: CLIENT });
        this.revealed.add(kernel.id);
        if (data.reveal) this.revealFirst(entry);
        this.refresh();
      }

      /* By itself only once for a kernel: who closed the sidebar wants it closed, also after a restart. */
      revealFirst(entry) {
        if (entry.fresh) this.reveal();
        entry.fresh = false;
      }

      /* Once the layout of the last session is in place, which would close it again. */
      reveal() {
        void this.app.restored.then(() => this.app.shell.activateById(this.id));
      }

      render(entry, modelId) {
        if (entry.modelId === modelId || this.entries.get(entry.kernel.id) !== entry) return;
        if (entry.view) entry.view.dispose();
        const mime = { version_major: 2, version_minor: 0, model_id: modelId };
        const view = entry.notebook.content.rendermime.createRenderer(WIDGET_VIEW);
        void view.renderModel({ data: { [WIDGET_VIEW]: mime }, metadata: {}, trusted: true, setData() {} });
        entry.modelId = modelId;
        entry.view = view;
        this.addWidget(view);
        this.refresh();
      }

      drop(kernelId, comm) {
        const entry = this.entries.get(kernelId);
        if (!entry || (comm && entry.comm !== comm)) return;
        this.tell(entry, false);
        this.entries.delete(kernelId);
        if (entry.view) entry.view.dispose();
        this.refresh();
      }

      /* Show the panel of the current notebook's kernel, or the hint. */
      refresh() {
        if (this.isDisposed) return;
        const kernel = kernelOf(this.tracker.currentWidget);
        const seen = this.isVisible && document.visibilityState === 'visible';
        let shown = false;
        for (const [id, entry] of this.entries) {
          const current = !!kernel && id === kernel.id;
          this.tell(entry, current && seen);
          if (entry.view) {
            entry.view.setHidden(!current);
            shown = shown || current;
          }
        }
        if (kernel && this.storage) {
          if (this.isVisible) this.storage.setItem(NAME, kernel.id);
          else this.storage.removeItem(NAME);
        }
        this.hint.setHidden(shown);
        if (!shown) this.explain(kernel);
      }

      explain(kernel) {
        const language = kernel && this.languages.get(kernel.id);
        this.hint.answer.textContent = (kernel && this.answers.get(kernel.id)) || '';
        this.hint.button.disabled = !!kernel && this.loading.has(kernel.id);
        if (!this.tracker.currentWidget) this.hint.say('Open a notebook to see its GPU memory here.', false);
        else if (!kernel) this.hint.say('This notebook has no kernel.', false);
        else if (this.entries.has(kernel.id)) this.hint.say('Waiting for the kernel…', false);
        else if (language && language !== 'python') this.hint.say('GPU memory is shown for Python kernels.', false);
        else if (this.loading.get(kernel.id)) this.hint.say('A cell is running: when it has ended, this runs', true);
        else if (!kernel.handleComms) {
          this.hint.say('Another notebook in this page opened this kernel first; reload the page to see its memory here.', false);
        } else this.hint.say('To see this notebook’s GPU memory here, run', true);
      }

      /* Run the line of the hint in the current notebook's kernel, outside its history. */
      async load() {
        const notebook = this.tracker.currentWidget;
        const kernel = kernelOf(notebook);
        if (!kernel || this.loading.has(kernel.id)) return;
        this.loading.set(kernel.id, kernel.status === 'busy');
        this.answers.delete(kernel.id);
        this.refresh();
        try {
          const future = kernel.requestExecute({ code: LOAD, store_history: false, stop_on_error: false });
          const content = (await future.done).content;
          if (content.status !== 'ok') {
            this.answers.set(kernel.id, content.ename ? `${content.ename}: ${content.evalue}` : 'The kernel did not run it.');
          } else if (!this.entries.has(kernel.id)) {
            // loaded before, by a front end that has no sidebar
            const comm = kernel.createComm(NAME);
            this.attach(notebook, kernel, comm, {});
            comm.open({});
          }
        } catch (error) {
          this.answers.set(kernel.id, String(error.message || error));
        } finally {
          this.loading.delete(kernel.id);
          this.refresh();
        }
      }

      /* The rows are made anew after a release: who goes by the keyboard stays where the pressed button was. */
      keepFocus() {
        const visible = selector => [...this.node.querySelectorAll(selector)].filter(node => node.offsetParent);
        let held = null;
        let row = -1;
        this.node.addEventListener('focusin', event => {
          held = event.target;
          row = visible('.gm-row button').indexOf(held);
        });
        this.node.addEventListener('focusout', event => {
          if (event.relatedTarget && !this.node.contains(event.relatedTarget)) held = null;
        });
        // a key held down would release one row after the other
        this.node.addEventListener('keydown', event => {
          if (event.repeat && event.key === 'Enter') event.preventDefault();
        });
        new MutationObserver(() => {
          if (!held) return;
          const [answer] = visible('.gm-answer');
          if (document.activeElement === document.body && !held.offsetParent && answer) {
            const place = row;
            answer.tabIndex = -1;
            answer.focus();
            row = place; // its row is drawn in a moment
          }
          if (row >= 0 && document.activeElement === answer) {
            const buttons = visible('.gm-row button');
            if (buttons.length) buttons[Math.min(row, buttons.length - 1)].focus();
          }
        }).observe(this.node, { childList: true, subtree: true });
      }

      /* Tell the kernel whether this window shows its panel: it draws only then. */
      tell(entry, seen) {
        if (entry.seen === seen) return;
        entry.seen = seen;
        this.send(entry, { method: seen ? 'shown' : 'hidden', client: CLIENT });
      }

      /* Say again that this window shows the panel: the kernel forgets a window that does not answer. */
      repeat(entry) {
        if (entry.seen) this.send(entry, { method: 'shown', client: CLIENT });
      }

      send(entry, data) {
        if (entry.comm.isDisposed || entry.kernel.isDisposed || entry.kernel.status === 'dead') return;
        const go = () => {
          if (entry.comm.isDisposed || entry.kernel.isDisposed) return;
          try {
            entry.comm.send(data);
          } catch (error) {
            console.warn(NAME, error);
          }
        };
        // before the comm has its subshell a message would wait behind every queued cell ("Run All")
        const started = entry.kernel.supportsSubshells && entry.comm.subshellStarted;
        if (!started || entry.ready) return go();
        const ready = () => { entry.ready = true; go(); };
        void Promise.race([started, new Promise(resolve => setTimeout(resolve, 2000))]).then(ready, ready);
      }
    }

    return {
      id: 'jupyter_gpumem:sidebar',
      description: 'Shows the GPU memory of the current notebook.',
      autoStart: true,
      requires: [notebookModule.INotebookTracker],
      optional: [applicationModule.ILayoutRestorer],
      activate(app, tracker, restorer) {
        const sidebar = new Sidebar(app, tracker, !!restorer);
        app.shell.add(sidebar, 'right', { rank: 600 });
        if (restorer) restorer.add(sidebar, sidebar.id);
      }
    };
  }

  window._JUPYTERLAB = window._JUPYTERLAB || {};
  window._JUPYTERLAB[NAME] = {
    init(shareScope) { scope = shareScope; },
    async get() {
      const modules = ['@jupyterlab/notebook', '@jupyterlab/application', '@lumino/widgets', '@jupyterlab/ui-components'];
      const plugin = define(...(await Promise.all(modules.map(shared))));
      return () => ({ __esModule: true, default: plugin });
    }
  };
})();
