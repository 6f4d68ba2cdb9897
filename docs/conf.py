"""How Sphinx makes the site of these pages: `python -m sphinx -W -n docs docs/_build/html`."""

import pathlib
import sys

HERE = pathlib.Path(__file__).parent
sys.path[:0] = [str(HERE / "_extensions"), str(HERE.parent)]

import jgrad  # noqa: E402

project = "jgrad"
release = jgrad.__version__
html_title = f"jgrad {release}"
html_favicon = "_static/icon.svg"
html_context = {"default_mode": "auto"}  # light or dark, as the reader's system is
html_theme = "sphinx_book_theme"
html_theme_options = {
    "footer_content_items": ["release.html"],
    "home_page_in_toc": True,
    "max_navbar_depth": 1,  # what an entry leads to is listed on its page
    "navbar_persistent": [],  # the sidebar has the search
    "show_navbar_depth": 1,
    "show_toc_level": 2,
    "use_fullscreen_button": False,
}
html_static_path = ["_static"]
templates_path = ["_extensions"]
html_css_files = ["site.css"]
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
    # Those of _extensions.
    "descriptions",
    "docstrings",
    "equations",
    "gallery",
    "guides",
    "home",
    "inline_equations",
    "pictures",
    "public_names",
    "reference",
    "release",
    "repository",
    "search_words",
]
exclude_patterns = ["_build", "_extensions"]

nb_execution_mode = "off"  # the notebooks have their outputs
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4  # as GitHub makes them
copybutton_exclude = ".linenos, .gp, .go"  # prompts and outputs

autodoc_typehints = "none"  # the docstrings say shapes and dtypes
default_role = "literal"  # docstrings have single backticks, as Markdown has
napoleon_numpy_docstring = False
napoleon_attr_annotations = False
napoleon_use_ivar = True
napoleon_use_rtype = False
napoleon_custom_sections = ["Source"]
python_maximum_signature_line_length = 80
toc_object_entries_show_parents = "hide"
add_function_parentheses = False  # names fit the narrow table of contents
